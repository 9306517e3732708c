#!/usr/bin/env bash
# The real vLLM without kernels: builds (or reuses) .venv-vllm-VERSION and runs tests/vllm in it.
#
#   tests/vllm.sh [VERSION [PYTEST_ARGUMENTS...]]     VERSION defaults to 0.33.0; 0.30.0 to 0.33.0 are tried
#   VLLM_ENV_ONLY=1 tests/vllm.sh [VERSION]           stops once the environment is ready
#
# VLLM_TARGET_DEVICE=empty builds vLLM's Python alone (no compiler, no CUDA); its real Scheduler, EncoderCacheManager
# and connector factory then run on any machine. A stamp makes a second run cost seconds.
set -euo pipefail
cd "$(dirname "$0")/.."

version=${1:-0.33.0}
shift || true
env=.venv-vllm-$version
python=${PYTHON:-$(command -v python3.11 || echo python3)}
stamp=$env/.stamp
wanted=$(cat tests/vllm.sh tests/vllm-requirements.txt tests/vllm-torchvision.py | sha256sum | cut -d' ' -f1)

if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
    echo "building $env: vllm $version without kernels (a few minutes, about 2 GB)" >&2
    rm -f "$stamp"
    [ -x "$env/bin/python" ] || "$python" -m venv "$env"
    # vLLM's own list of requirements is left out on purpose: pip need not say so at every step.
    pip() {
        "$env/bin/python" -m pip -qq --disable-pip-version-check "$@" \
            2> >(grep -vE "which is (not installed|incompatible)|dependency resolver does not" >&2)
    }
    pip install torch==2.13.0 "setuptools>=78.1.1,<81" setuptools-scm setuptools-rust wheel ninja cmake packaging jinja2
    # Where cargo is on PATH the build compiles an optional tokenizer in Rust: minutes, and crates that need a network.
    without_cargo=$(tr ':' '\n' <<<"$PATH" | while read -r d; do [ -x "$d/cargo" ] || printf '%s:' "$d"; done)
    if ! "$env/bin/python" -c "import importlib.metadata as m, sys; sys.exit(m.version('vllm').split('+')[0] != '$version')" 2>/dev/null; then
        PATH=${without_cargo%:} VLLM_VERSION_OVERRIDE=$version VLLM_TARGET_DEVICE=empty \
            "$env/bin/python" -m pip -qq install --no-build-isolation --no-deps --no-binary vllm "vllm==$version"
    fi
    case $version in
        0.30.*) transformers="transformers>=5.10.4,<5.15" ;; # it names no upper end; 5.14 works, 5.17 lacks a name it imports
        0.31.*) transformers="transformers>=5.10.4,<5.18" ;;
        0.32.*) transformers="transformers>=5.16.1,<5.20" ;;
        *) transformers="transformers>=5.16.1,<5.21" ;;
    esac
    pip install -r tests/vllm-requirements.txt torch==2.13.0 "$transformers"
    # xgrammar asks for triton (1 GB), which nothing here compiles with.
    pip uninstall -y triton || true
    pip install --no-deps torchvision==0.28.0
    "$env/bin/python" tests/vllm-torchvision.py
    echo "$wanted" > "$stamp"
fi
# An editable install also registers ecoffload's entry points, which is how vLLM finds the connector by its name alone.
project=$(sha256sum pyproject.toml | cut -d' ' -f1)
if [ "$(cat "$env/.stamp-ecoffload" 2>/dev/null)" != "$project" ]; then
    "$env/bin/python" -m pip -qq --disable-pip-version-check install --no-deps -e .
    echo "$project" > "$env/.stamp-ecoffload"
fi
[ -z "${VLLM_ENV_ONLY:-}" ] || exit 0
exec "$env/bin/python" -m pytest -p no:cacheprovider -W default tests/vllm --ignore tests/vllm/e2e "$@"
