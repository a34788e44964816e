#!/usr/bin/env bash
# Runs the tests that need no engine and no server, with the Python of an environment: scripts/test_without_engine.sh VENV.
# The longest of them are left to `make test`.
set -eu
cd "$(dirname "$0")/.."
exec "$1/bin/python" -m pytest -n 2 --dist loadscope --no-loadscope-reorder -m 'not real and not long and not soak and not proof'
