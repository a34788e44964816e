#!/usr/bin/env bash
# A stranger's first hour, as CONTRIBUTING.md tells it, with the minutes that each step takes: scripts/first_hour.sh [REPOSITORY]
#
# In an empty folder: clone, set up and `make check`, change one error message, see the test that fails, run that test alone, put
# the message right in both, commit through pre-commit with a sign-off. The folder is removed; the repository is left as it is.
set -euo pipefail
repository=${1:-$(cd "$(dirname "$0")/.." && pwd)}
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
began=$(date +%s)
step_began=$began

done_with() { # WHAT: print how long it took
    local now
    now=$(date +%s)
    printf '[first hour] %-58s %d min %02d s\n' "$1" $(((now - step_began) / 60)) $(((now - step_began) % 60))
    step_began=$now
}

must_fail() {
    ! "$@" >"$place/log" 2>&1 || { cat "$place/log" >&2; echo "[first hour] that should have failed: $*" >&2; exit 1; }
}

quietly() {
    "$@" >"$place/log" 2>&1 || { cat "$place/log" >&2; echo "[first hour] failed: $*" >&2; exit 1; }
}

cd "$place"
quietly git clone --quiet "$repository" kvpact
cd kvpact
git config user.name Stranger
git config user.email stranger@example.org
done_with "clone"

quietly make check
done_with "make check, the first time: .venv and all"
quietly make check
done_with "make check, again"

python=.venv/bin/python
asked='say in which unit' now='name the unit'
tests=tests/cli/test_cli_stores.py
file=src/kvpact/units.py
grep -q "$asked" "$file" || { echo "[first hour] $file does not say \"$asked\" any more" >&2; exit 1; }
sed -i "s/$asked/$now/" "$file"
must_fail $python -m pytest -q -n 2 "$tests"
failed=$(grep -o '^FAILED [^ ]*' "$place/log" | head -1 | cut -d' ' -f2 | cut -d'[' -f1)
done_with "change a message in units.py, see a test fail"

must_fail $python -m pytest -q "$failed"
done_with "run that test alone"

sed -i "s/$asked/$now/" "$tests"
quietly $python -m pytest -q "$failed"
quietly $python -m pip install -q pre-commit
quietly .venv/bin/pre-commit install
quietly git commit --quiet --all --signoff --message "Units: name the unit in fewer words"
git log -1 --format=%B | grep -q '^Signed-off-by: Stranger'
done_with "mend the test, install pre-commit, commit through it"

step_began=$began
done_with "all together"
