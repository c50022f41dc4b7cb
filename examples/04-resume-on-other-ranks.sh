#!/usr/bin/env bash
# Shows: a run saved on 4 ranks and resumed on 2 has the curve of a run that was never stopped. About 15 seconds.
#
#   examples/04-resume-on-other-ranks.sh
#
# HPCTRAIN names the program (default ./target/release/hpctrain).
set -euo pipefail
HPCTRAIN=${HPCTRAIN:-./target/release/hpctrain}

export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export OMPI_MCA_rmaps_base_oversubscribe=1 PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe

runs=$(mktemp -d "${TMPDIR:-/tmp}/hpctrain-04.XXXXXX")

# Virtual ranks fix the order of additions. The learning rate is constant, because a cosine schedule depends on run.steps.
train() {
    local ranks=$1
    shift
    mpirun -np "$ranks" "$HPCTRAIN" --set run.root="$runs" --set parallel.virtual_ranks=4 --set lr_schedule.kind=constant \
        --set lr_schedule.warmup=10 --set eval.samples=64 --set log.sample_tokens=0 "$@" >/dev/null
}

train 1 --set run.name=whole --set run.steps=40
train 4 --set run.name=parts --set run.steps=20
echo "saved on 4 ranks: $(ls -m "$runs/parts/checkpoints/latest/")"
train 2 --set run.name=parts --set run.steps=40 --resume auto

losses() { sed 's/.*"step":\([0-9]*\),.*"loss":\([^,]*\),.*/\1 \2/' "$runs/$1/metrics.jsonl"; }
losses whole | sed -n '20,22p'
cmp <(losses whole) <(losses parts)
echo "all $(losses parts | wc -l) losses are bit-identical to those of the run on one rank"
