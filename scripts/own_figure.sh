#!/usr/bin/env bash
# Somebody's first figure of her own, as README tells it: scripts/own_figure.sh [OPTION ...]
#
# Builds both wheels, installs them in a fresh environment beside the vLLM of VENV (.venv unless it is set), and types `kvpact
# compare OPTION ...`, by itself `kvpact compare --quick`, as a user whose home is empty and who has no checkout; variables
# KVPACT_... are hers too. Says how long it took once all was installed, and fails above ten minutes. With `--work FOLDER`
# what it found stays there.
set -euo pipefail
cd "$(dirname "$0")/.."
engine=$(cd "${VENV:-.venv}" && pwd)
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT

say() { printf '[own figure] %s\n' "$*"; }
quietly() { "$@" >"$place/log" 2>&1 || { cat "$place/log" >&2; say "failed: $*" >&2; exit 1; }; }

for folder in . kit; do
    quietly "$engine/bin/python" -m build --no-isolation --wheel --outdir "$place/dist" "$folder"
done
quietly "$engine/bin/python" -m venv "$place/user"
# A path in a .pth file is searched, and its own .pth files, which name the checkout, are not read.
"$engine/bin/python" -c 'import site; print(*site.getsitepackages(), sep="\n")' >"$(echo "$place"/user/lib/python*/site-packages)/vllm.pth"
quietly "$place/user/bin/python" -m pip --disable-pip-version-check install "$place"/dist/*.whl
say "installed: $(cd "$place/dist" && echo *.whl)"

mkdir "$place/home"
[ $# -gt 0 ] || set -- --quick
cd "$place/home"
began=$(date +%s)
status=0
mapfile -t ours < <(env | grep '^KVPACT_' || true)
env -i "${ours[@]}" HOME="$place/home" PATH="$place/user/bin:/usr/bin:/bin" LANG=C.UTF-8 kvpact compare "$@" || status=$?
took=$(($(date +%s) - began))
say "$((took / 60)) min $((took % 60)) s, exit status $status, after installation"
[ "$status" = 0 ] || exit "$status"
[ "$took" -le 600 ] || { say "more than ten minutes" >&2; exit 1; }
