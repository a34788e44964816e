#!/usr/bin/env bash
# Prints the interpreter that .venv is made with: $PYTHON, or else the first of these that is 3.11 or newer and has venv.
# scripts/find_python.sh 3.13 prints one of that version, of this machine or of its user's pyenv.
set -eu
version=${1:-}
if [ -n "$version" ]; then
    candidates="python$version ${HOME:-}/.pyenv/versions/$version.*/bin/python"
else
    candidates=${PYTHON:-python3.11 python3.12 python3.13 python3}
fi
for candidate in $candidates; do
    if "$candidate" -c 'import sys, venv, ensurepip
wanted = sys.argv[1]
sys.exit(wanted != "%d.%d" % sys.version_info[:2] if wanted else sys.version_info < (3, 11))' "$version" >/dev/null 2>&1; then
        command -v "$candidate"
        exit
    fi
done
echo "[setup] Python ${version:-3.11 or newer} with its venv module is needed (Debian: apt install python3-venv); PYTHON=/path names one" >&2
exit 1
