#!/usr/bin/env bash
# Shows: one training run on two ranks, its directory, and text from its last checkpoint. About 15 seconds.
#
#   examples/01-first-run.sh
#
# HPCTRAIN names the program (default ./target/release/hpctrain).
set -euo pipefail
HPCTRAIN=${HPCTRAIN:-./target/release/hpctrain}

# Open MPI requires these settings to run as root, and with more ranks than cores.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export OMPI_MCA_rmaps_base_oversubscribe=1 PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe

runs=$(mktemp -d "${TMPDIR:-/tmp}/hpctrain-01.XXXXXX")

# Two ranks share each batch of 16 samples.
mpirun -np 2 "$HPCTRAIN" --set run.root="$runs" --set run.name=first \
    --set run.steps=150 --set lr_schedule.warmup=20 --set eval.samples=320

echo "--- $runs/first holds"
ls "$runs/first"
echo "--- the last line of metrics.jsonl"
tail -n 1 "$runs/first/metrics.jsonl"
echo "--- text from the checkpoint"
"$HPCTRAIN" sample --checkpoint "$runs/first/checkpoints/latest" --prompt "ROMEO:" --tokens 100
