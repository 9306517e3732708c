#!/usr/bin/env bash
# The rocm backend on a real HIP runtime that cannot serve it: Debian's libamdhip64-5 (5.2.3: no device here, no batched
# copy). Asks whether "present but unusable" gives the right reason.
#
#   tests/rocm-debian.sh [PYTEST_ARGUMENTS...]     as root where the package is not installed yet
#
# PYTHON names the interpreter of an environment with ecoffload and ecoffload-rocm (default: .venv's).
set -euo pipefail
cd "$(dirname "$0")/.."

package=libamdhip64-5
if ! dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null | grep -qx installed; then
    if ! apt-cache show "$package" >/dev/null 2>&1; then
        [ "$(id -u)" = 0 ] && apt-get update -qq
    fi
    apt-cache show "$package" >/dev/null 2>&1 || { echo "$0: this system has no package $package (Debian 12 does)" >&2; exit 3; }
    [ "$(id -u)" = 0 ] || { echo "$0: installing $package needs root: sudo apt-get install $package" >&2; exit 3; }
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$package" >&2
fi
exec "${PYTHON:-.venv/bin/python}" -m pytest -q backends/rocm/tests/debian_runtime.py "$@"
