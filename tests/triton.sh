#!/usr/bin/env bash
# Runs the pointer-table examples: on CUDA where torch finds it, else in Triton's interpreter on the CPU.
#
#   tests/triton.sh [PYTEST ARGUMENT...]
#
# The environment is made once and kept as .venv-triton in ECOFFLOAD_ENVS (default: the repository's root); the triton
# wheel is 285 MB. PYTHON_TRITON=... names an interpreter that has torch, triton, numpy, pydantic and pytest already.
set -euo pipefail
cd "$(dirname "$0")/.."
env=${ECOFFLOAD_ENVS:-$PWD}/.venv-triton
if [ -z "${PYTHON_TRITON:-}" ]; then
    PYTHON_TRITON=$env/bin/python
    if [ ! -e "$env/complete" ]; then # a half-made environment is made again
        rm -rf "$env"
        "${PYTHON:-python3.11}" -m venv "$env"
        "$env/bin/pip" install -q "torch==2.13.0" "triton==3.7.1" "numpy>=2" "pydantic>=2.7" "pytest>=8"
        touch "$env/complete"
    fi
fi
# Neither the project's settings nor plugins, so that a GPU machine without its test tools can run this too.
PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 PYTHONPATH=src${PYTHONPATH:+:$PYTHONPATH} exec "$PYTHON_TRITON" -m pytest -q \
    -c /dev/null --rootdir=. --noconftest --import-mode=importlib -p no:cacheprovider \
    tests/triton/check_examples.py "$@"
