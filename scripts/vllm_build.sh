#!/usr/bin/env bash
# Prints which build of vLLM belongs on this machine: scripts/vllm_build.sh
#
#   cuda  where nvidia-smi lists a GPU
#   cpu   elsewhere, also where nvidia-smi fails or says nothing within 20 seconds
#
# KVPACT_ENGINE=cpu or KVPACT_ENGINE=cuda is printed as it is.
set -eu

case ${KVPACT_ENGINE:-} in
    cpu | cuda) echo "$KVPACT_ENGINE"; exit ;;
    '') ;;
    *) echo "[setup] KVPACT_ENGINE=$KVPACT_ENGINE; known: cpu, cuda" >&2; exit 1 ;;
esac
build=cpu
if command -v nvidia-smi >/dev/null; then
    gpus=$(timeout --kill-after=2 20 nvidia-smi -L 2>/dev/null) || gpus=
    while IFS= read -r line; do
        [[ $line != "GPU "* ]] || build=cuda
    done <<<"$gpus"
fi
echo "$build"
