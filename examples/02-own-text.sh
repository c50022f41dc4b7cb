#!/usr/bin/env bash
# Shows: your own text as HDF5 shards, a model trained on it, and what that model writes. About 15 seconds.
#
#   examples/02-own-text.sh                  with a README for a text
#   examples/02-own-text.sh my-novel.txt     with yours
#
# HPCTRAIN names the program (default ./target/release/hpctrain).
set -euo pipefail
HPCTRAIN=${HPCTRAIN:-./target/release/hpctrain}
text=${1:-$(dirname "$0")/../README.md}

export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export OMPI_MCA_rmaps_base_oversubscribe=1 PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe

work=$(mktemp -d "${TMPDIR:-/tmp}/hpctrain-02.XXXXXX")

# One id for each of the text's characters. For a large text try --tokenizer gpt2.
"$HPCTRAIN" data import text "$text" --tokenizer char --shards 2 --val-fraction 0.1 --out "$work/data"
"$HPCTRAIN" data inspect "$work/data"
"$HPCTRAIN" data verify "$work/data"

mpirun -np 2 "$HPCTRAIN" --set run.root="$work/runs" --set run.name=own --set data.path="$work/data" \
    --set run.steps=150 --set lr_schedule.warmup=20 --set log.sample_tokens=0

echo "--- it has learned to write"
"$HPCTRAIN" sample --checkpoint "$work/runs/own/checkpoints/latest" --tokens 200
