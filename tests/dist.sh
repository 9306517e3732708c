#!/usr/bin/env bash
# What a user installs: `ecoffload[cuda]` from dist/ into an empty environment, without the repository on the path. The
# demo runs on the CPU, the conformance suite passes, and nothing of rocm or xpu is there. Then every command of the
# documentation that installs what is not published yet, as written there, in a copy of the tree.
set -euo pipefail
cd "$(dirname "$0")/.."
root=$PWD
env=$(mktemp -d)
trap 'rm -rf "$env"' EXIT
trap 'exit 1' INT TERM

"${PYTHON:-python3}" -m venv "$env/venv"
pip=("$env/venv/bin/python" -m pip install --quiet --no-compile --disable-pip-version-check --find-links "$root/dist" -c constraints.txt)
"${pip[@]}" "ecoffload[cuda,demo,testing]"
cd "$env"

"$env/venv/bin/ecoffload" demo --turns 3 --json >demo.json
"$env/venv/bin/ecoffload" backends --json >backends.json
"$env/venv/bin/python" - <<'PY'
import json

totals = json.load(open("demo.json"))["totals"]
assert totals["mismatched"] == 0 and totals["verified"] > 0, totals
backends = {each["name"]: each["status"] for each in json.load(open("backends.json"))}
assert backends.keys() == {"cpu", "cuda"}, backends
assert backends["cpu"] == "ok", backends
print(f"demo: {totals['verified']} reloads verified; backends: {backends}")
PY
"$env/venv/bin/python" -m pytest -q -p no:cacheprovider --pyargs ecoffload.testing.conformance --ecoffload-backend=cpu

cd "$root"
every=$("$env/venv/bin/python" -c 'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"], sep=",")')
"${pip[@]}" --dry-run "ecoffload[$every]" # whatever extra a page or a message names

mkdir "$env/clone"
git ls-files -z --cached --others --exclude-standard | xargs -0 cp --parents --no-dereference --target-directory "$env/clone"
"$env/venv/bin/python" tests/docs/pages.py "$env/venv" "$env/clone"
