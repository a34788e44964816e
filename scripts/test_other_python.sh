#!/usr/bin/env bash
# Runs the tests of `make check` on another Python: scripts/test_other_python.sh VERSION, such as 3.13.
#
# They run in .venv-VERSION, which scripts/setup_venv.sh makes without vLLM; a test that needs torch skips itself
# there. Where the machine has no such Python one line says so, and nothing has been tested.
set -eu
cd "$(dirname "$0")/.."
version=$1

if ! python=$(./scripts/find_python.sh "$version" 2>/dev/null); then
    echo "[test-$version] NOT RUN: this machine has no Python $version with its venv module (neither python$version nor pyenv has it)"
    exit
fi
export KVPACT_VENV=.venv-$version PYTHON=$python
./scripts/setup_venv.sh dev
./scripts/test_without_engine.sh "$KVPACT_VENV"
