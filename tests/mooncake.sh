#!/usr/bin/env bash
# The tier on a real Mooncake Store on loopback: master, storage node and clients are started by the tests.
#
#   tests/mooncake.sh [PYTEST_ARGUMENTS...]    builds or reuses .venv-mooncake (1 GB); as root where Debian's packages
#   MOONCAKE_ENV_ONLY=1 tests/mooncake.sh      (libibverbs1 libcurl4 libnuma1) are missing. Stops with the environment.
set -euo pipefail
cd "$(dirname "$0")/.."

missing=()
for package in libibverbs1 libcurl4 libnuma1; do
    dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null | grep -qx installed || missing+=("$package")
done
if [ ${#missing[@]} -gt 0 ]; then
    [ "$(id -u)" = 0 ] || { echo "$0: install as root: apt-get install ${missing[*]}" >&2; exit 3; }
    apt-cache show "${missing[0]}" >/dev/null 2>&1 || apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >&2
fi

env=.venv-mooncake
wanted=$(cat tests/mooncake.sh constraints.txt pyproject.toml | sha256sum | cut -d' ' -f1)
if [ "$(cat "$env/.stamp" 2>/dev/null)" != "$wanted" ]; then
    echo "building $env (a few minutes, about 1 GB)" >&2
    [ -x "$env/bin/python" ] || "${PYTHON:-python3.11}" -m venv "$env"
    "$env/bin/python" -m pip -qq --disable-pip-version-check install \
        -c constraints.txt -e '.[testing]' pytest-timeout mooncake-transfer-engine-non-cuda==0.3.13.post1
    echo "$wanted" > "$env/.stamp"
fi
[ -z "${MOONCAKE_ENV_ONLY:-}" ] || exit 0
exec "$env/bin/python" -m pytest -q -p no:cacheprovider tests/mooncake "$@"
