#!/usr/bin/env bash
# The xpu backend on the real SYCL runtime's CPU device: no Intel GPU needed, nothing emulated below libsycl's symbols.
#
#   tests/xpu.sh [PYTEST_ARGUMENTS...]     both runtime generations: libsycl.so.9 (.venv-xpu-9) and .so.8 (.venv-xpu-8)
#   XPU_GENERATIONS="9" tests/xpu.sh       only those
#   XPU_ENV_ONLY=1 tests/xpu.sh            stops once the environments are ready (about 1.5 GB each)
#
# A stamp makes a second run cost seconds. Needs g++ (the shim is built with the package).
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-python3.11}

requirements() {
    case $1 in
        9) echo dpctl==0.22.1 intel-opencl-rt==2026.2.* intel-sycl-rt==2026.2.* ;;
        8) echo dpctl==0.21.1 intel-opencl-rt==2025.3.3 intel-sycl-rt==2025.3.3 ;;
        *) echo "tests/xpu.sh: no runtime generation $1, there are 9 and 8" >&2; return 2 ;;
    esac
}

environment() {
    local env=.venv-xpu-$1 wanted
    wanted=$({ requirements "$1"; cat tests/xpu-requirements.txt constraints.txt; } | sha256sum | cut -d' ' -f1)
    if [ "$(cat "$env/.stamp" 2>/dev/null)" != "$wanted" ]; then
        echo "building $env (a few minutes, about 1.5 GB)" >&2
        rm -f "$env/.stamp"
        [ -x "$env/bin/python" ] || "$python" -m venv "$env"
        # shellcheck disable=SC2046
        "$env/bin/python" -m pip --quiet --disable-pip-version-check install \
            -c constraints.txt -r tests/xpu-requirements.txt $(requirements "$1")
        echo "$wanted" > "$env/.stamp"
    fi
}

install() {  # editable, so that the suite runs what the tree holds; again only when what is built has changed
    local env=.venv-xpu-$1 wanted
    wanted=$(cat pyproject.toml backends/xpu/{pyproject.toml,hatch_build.py,src/ecoffload_xpu/shim.cpp} | sha256sum | cut -d' ' -f1)
    if [ "$(cat "$env/.installed" 2>/dev/null)" != "$wanted" ] || [ ! -e backends/xpu/src/ecoffload_xpu/_shim.so ]; then
        "$env/bin/python" -m pip --quiet --disable-pip-version-check install --no-deps --no-build-isolation \
            -e . -e backends/xpu
        echo "$wanted" > "$env/.installed"
    fi
}

for generation in ${XPU_GENERATIONS:-9 8}; do environment "$generation"; install "$generation"; done
[ -z "${XPU_ENV_ONLY:-}" ] || exit 0
[ -e backends/xpu/src/ecoffload_xpu/_shim.so ] || { echo "tests/xpu.sh: the shim was not built: install g++" >&2; exit 1; }

reports=.cache/reports
mkdir -p "$reports"
for generation in ${XPU_GENERATIONS:-9 8}; do
    python=.venv-xpu-$generation/bin/python
    echo "== libsycl.so.$generation: the recorder, then the real runtime" >&2
    "$python" -m pytest -q backends/xpu/tests "$@"
    "$python" -m pytest -q backends/xpu/tests/runtime "$@"
    for way in shim dpctl; do
        echo "== libsycl.so.$generation: the conformance suite through $way" >&2
        ECOFFLOAD_XPU_WAY=$way "$python" -m pytest -q --pyargs ecoffload.testing.conformance \
            --ecoffload-backend=sycl-cpu --ecoffload-backend=sycl-cpu-plain \
            --ecoffload-report="$reports/xpu-libsycl-$generation-$way.json" "$@"
    done
done
echo "tests/xpu.sh: green on the SYCL CPU device: libsycl generations ${XPU_GENERATIONS:-9 8}, ways shim and dpctl"
