#!/bin/sh
# The suite inside a /dev/shm of 64 MiB, a container's default, seen by this run alone. Needs root and unshare(1).
#
#     tests/small-shm.sh [pytest's arguments; all of tests/ without any]
set -eu
cd "$(dirname "$0")/.."
[ $# -gt 0 ] || set -- tests
exec unshare -m sh -euc '
    mount -t tmpfs -o size=64m,nosuid,nodev tmpfs /dev/shm
    status=0
    "${PYTHON:-.venv/bin/python}" -m pytest -q "$@" || status=$?
    left=$(find /dev/shm -mindepth 1)
    if [ -n "$left" ]; then
        echo "left in /dev/shm:" >&2
        echo "$left" >&2
        status=1
    fi
    df -k /dev/shm | tail -1
    exit $status
' small-shm "$@"
