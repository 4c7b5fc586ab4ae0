#!/bin/sh
# Runs cancel-latency over a model of the shape of Llama 3 8B, which it makes and removes.
#     cancel_latency_8b.sh MAKE_MODEL CANCEL_LATENCY TOKENS REPETITIONS MAX_MS MAX_WAIT [CALL...]
set -eu
make_model=$1 cancel_latency=$2
shift 2
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' HUP INT TERM
export TMPDIR="$folder"
"$make_model" --shape 8b --vocab 128256 --type Q4_K -o "$folder/8b.gguf"
"$cancel_latency" "$folder/8b.gguf" "$@"
