#!/usr/bin/env bash
# Sees to the Debian packages that are needed beside .venv: scripts/system_packages.sh [PART ...]
#
#   make         make itself
#   venv         a Python that can make .venv
#   engine       what the build of vLLM loads that scripts/vllm_build.sh chooses
#   engine=cpu   what vLLM's CPU build loads
#   engine=cuda  what compiles the launchers of Triton's kernels under vLLM's CUDA build; the driver is there already
#   dev          the servers and tools that tests start, and what Mooncake's client loads
#
# It looks for the commands and libraries themselves, so that a call that finds all is quick and needs no apt. What is
# missing is installed where the caller is root or has sudo without a password. Otherwise one line says what to install.
set -eu
cd "$(dirname "$0")/.."

policy=/usr/sbin/policy-rc.d # Debian asks it whether a package may start its service
missing=()

need_command() { # name, package
    command -v "$1" >/dev/null || missing+=("$2")
}

need_library() { # name, package
    "$python" -c 'import ctypes, sys; ctypes.CDLL(sys.argv[1])' "$1" 2>/dev/null || missing+=("$2")
}

need_headers_of_python() { # package
    "$python" -c 'import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' || missing+=("$1")
}

venv=${KVPACT_VENV:-.venv}
if [ -x "$venv/bin/python" ]; then
    python=$venv/bin/python
else
    python=$(./scripts/find_python.sh 2>/dev/null) || python=python3
fi
for part in "$@"; do
    [ "$part" != engine ] || part=engine=$(./scripts/vllm_build.sh)
    case $part in
        make) need_command make make ;;
        venv) [ -x "$venv/bin/python" ] || ./scripts/find_python.sh >/dev/null 2>&1 || missing+=(python3-venv) ;;
        engine=cpu) need_library libnuma.so.1 libnuma1 ;;
        engine=cuda)
            need_command "${CC:-gcc}" gcc
            need_command "${CC:-gcc}" libc6-dev
            need_headers_of_python python3-dev
            ;;
        dev)
            need_command redis-server redis-server
            need_command openssl openssl
            need_command prometheus prometheus
            [ "$(id -u)" != 0 ] || need_command ip iproute2 # only root can cut a network
            need_library libibverbs.so.1 libibverbs1
            need_library libcurl.so.4 libcurl4
            ;;
        *) echo "[setup] unknown part \"$part\"; known: make, venv, engine, engine=cpu, engine=cuda, dev" >&2; exit 1 ;;
    esac
done
if [ ${#missing[@]} -eq 0 ]; then
    exit
fi
if ! command -v apt-get >/dev/null; then
    echo "[setup] missing: what Debian has as ${missing[*]}; install it first" >&2
    exit 1
fi
if [ "$(id -u)" = 0 ]; then
    root=(env)
elif sudo -n true 2>/dev/null; then
    root=(sudo -n)
else
    echo "[setup] missing: ${missing[*]}; install them first: sudo apt-get install ${missing[*]}" >&2
    exit 1
fi
echo "[setup] installing ${missing[*]}"
if ! stat "$policy" >/dev/null 2>&1; then # the tests start servers of their own; Debian's would stay on their ports
    trap '"${root[@]}" rm -f "$policy"' EXIT
    printf '#!/bin/sh\nexit 101\n' | "${root[@]}" tee "$policy" >/dev/null
    "${root[@]}" chmod 755 "$policy"
fi
"${root[@]}" apt-get update -qq
"${root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -qq --yes --no-install-recommends "${missing[@]}"
for server in redis-server prometheus; do
    if [[ " ${missing[*]} " = *" $server "* ]] && command -v systemctl >/dev/null; then
        "${root[@]}" systemctl --quiet disable "$server" # nor after the next start of the machine
    fi
done
