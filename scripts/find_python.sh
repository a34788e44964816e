#!/usr/bin/env bash
# Prints the interpreter that .venv is made with: $PYTHON, or else the first of these that is 3.11 or newer and has venv.
set -eu
for candidate in ${PYTHON:-python3.11 python3.12 python3.13 python3}; do
    if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
        command -v "$candidate"
        exit
    fi
done
echo "[setup] Python 3.11 or newer with its venv module is needed (Debian: apt install python3-venv); PYTHON=/path names one" >&2
exit 1
