#!/usr/bin/env bash
# A cluster on this machine: Mooncake's master, a storage node, one process that encodes and two that load.
#
#   examples/cluster/run.sh            ENV names the environment with ecoffload and Mooncake (default: .venv-mooncake)
set -euo pipefail
cd "$(dirname "$0")/../.."
bin=${ENV:-.venv-mooncake}/bin
[ -x "$bin/mooncake_master" ] || { echo "$0: no Mooncake in $bin; run: MOONCAKE_ENV_ONLY=1 tests/mooncake.sh" >&2; exit 3; }

free_port() { "$bin/python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }
logs=$(mktemp -d)
started=()
finish() {
    [ ${#started[@]} -eq 0 ] || kill "${started[@]}" 2>/dev/null || true
    rm -rf "$logs"
}
trap finish EXIT

master=127.0.0.1:$(free_port)
"$bin/mooncake_master" --rpc_address=127.0.0.1 --rpc_port="${master#*:}" --metrics_host=127.0.0.1 \
    --metrics_port="$(free_port)" > "$logs/master" 2>&1 &
started+=($!)
node=$(free_port)
"$bin/mooncake_client" --host=127.0.0.1 --port="$node" --master_server_address="$master" \
    --metadata_server=P2PHANDSHAKE --protocol=tcp --global_segment_size=256MB > "$logs/node" 2>&1 &
started+=($!)
"$bin/python" - "${master#*:}" "$node" <<'PY'
import socket, sys, time
end = time.monotonic() + 20
for port in map(int, sys.argv[1:]):
    while socket.socket().connect_ex(("127.0.0.1", port)):
        if time.monotonic() > end:
            sys.exit("Mooncake did not come up")
        time.sleep(0.05)
PY

run() { "$bin/python" -W ignore examples/cluster/node.py "$@" 2>/dev/null | grep '^{'; }
{
    run encoder "mooncake://$master?wait=5" 0 24
    run consumer-1 "mooncake://$master?wait=5" 0 24 > "$logs/1" &
    run consumer-2 "mooncake://$master?wait=5" 8 32
    wait $!
    cat "$logs/1"
} | "$bin/python" -c '
import json, sys
rows = [json.loads(line) for line in sys.stdin]
print("{:<12} {:>8} {:>8} {:>10}".format("", "encoded", "loaded", "published"))
for row in sorted(rows, key=lambda row: row["node"] != "encoder"):
    print("{node:<12} {encoded:>8} {loaded:>8} {published:>10}".format(**row))
sys.exit(len(rows) != 3)
'
