#!/usr/bin/env bash
# Runs the pointer tests and the conformance kit on each pair of torch and numpy versions whose answers differ.
#
#   tests/matrix.sh [CELL...]        a cell is TORCH/NUMPY, e.g. 2.14.1/2; without one: all of them
#
# One environment a cell, made once and kept as .venv-matrix-* in ECOFFLOAD_ENVS (default: the repository's root).
# torch 2.14.1 is a CUDA build: 5.5 GB. Prints one line a cell and a last line "matrix: N passed cells of N";
# exits 1 unless all passed.
set -uo pipefail
cd "$(dirname "$0")/.."
root=$PWD
envs=${ECOFFLOAD_ENVS:-$root}
python=${PYTHON:-python3.11}
cells=("${@:-}")
[ -n "${cells[0]}" ] || cells=(2.13.0/1.26.4 2.13.0/2 2.14.1/2)

make_env() { # DIR TORCH NUMPY
    "$python" -m venv "$1" || return
    # `==2.*` for a bare major: the newest numpy of it.
    local numpy=$3
    [[ $numpy == *.* ]] || numpy="$numpy.*"
    "$1/bin/pip" install -q "torch==$2" "numpy==$numpy" "pydantic>=2.7" "pluggy>=1.5" "sortedcontainers>=2.4" \
        "xxhash>=3.4" "pytest>=8" "pytest-timeout" "hypothesis>=6.100" "hatchling>=1.24" editables &&
        touch "$1/complete"
}

passed=0
for cell in "${cells[@]}"; do
    torch=${cell%/*} numpy=${cell#*/}
    env=$envs/.venv-matrix-torch$torch-numpy$numpy
    log=$(mktemp)
    started=$SECONDS
    # A half-made environment (an interrupted download) is made again.
    if [ ! -e "$env/complete" ]; then
        rm -rf "$env"
        make_env "$env" "$torch" "$numpy" >"$log" 2>&1
    fi
    run() { (cd "$root" && "$env/bin/python" -m pytest -q -p no:cacheprovider "$@") >>"$log" 2>&1; }
    # Editable, because backends and the pytest plugin are found by their entry points.
    "$env/bin/pip" install -q --no-deps --no-build-isolation -e "$root" >>"$log" 2>&1 &&
        run tests/pointers &&
        { [ ! -d src/ecoffload/testing/conformance ] || run --pyargs ecoffload.testing.conformance; }
    status=$?
    versions=$("$env/bin/python" -c 'import numpy, torch; print(f"torch {torch.__version__}, numpy {numpy.__version__}")' 2>&1 | tail -1)
    counts=$(grep -E '^[0-9]+ passed' "$log" | sed 's/ in .*//' | paste -sd+ | sed 's/+/ + /g')
    if [ $status -eq 0 ]; then
        passed=$((passed + 1))
        echo "matrix: $versions: ${counts:-nothing ran} in $((SECONDS - started)) s"
    else
        tail -40 "$log"
        echo "matrix: $versions: FAILED in $((SECONDS - started)) s"
    fi
    rm -f "$log"
done
echo "matrix: $passed passed cells of ${#cells[@]}"
[ $passed -eq ${#cells[@]} ]
