#!/usr/bin/env bash
# Shows: three ways to start an evaluator for a trainer, and that their losses are bitwise equal to those that the
# trainer computes when it evaluates itself. About half a minute.
#
#   examples/06-evaluator-beside-the-trainer.sh
#
# HPCTRAIN names the program (default ./target/release/hpctrain).
set -euo pipefail
HPCTRAIN=${HPCTRAIN:-./target/release/hpctrain}

export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export OMPI_MCA_rmaps_base_oversubscribe=1 PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe

runs=$(mktemp -d "${TMPDIR:-/tmp}/hpctrain-06.XXXXXX")
settings=(--set "run.root=$runs" --set run.steps=60 --set checkpoint.every=20 --set eval.every=20
    --set eval.samples=256 --set parallel.virtual_ranks=2 --set log.sample_tokens=0)

# One evaluation a line: the step and the exact loss.
losses() { sed 's/.*"step":\([0-9]*\),.*"loss":\([^,]*\),.*/\1 \2/' "$runs/$1/eval.jsonl"; }

# The trainer evaluates itself.
mpirun -np 2 "$HPCTRAIN" train "${settings[@]}" --set run.name=inline >/dev/null
losses inline

# 1. The last rank of the trainer's own job.
mpirun -np 3 "$HPCTRAIN" train --evaluators 1 --policy every "${settings[@]}" --set run.name=ranks >/dev/null
cmp <(losses inline) <(losses ranks) && echo "the same from ranks of the job"

# 2. Another program of the same job (MPMD); its two ranks share each evaluation.
mpirun -np 2 "$HPCTRAIN" train "${settings[@]}" --set run.name=mpmd \
    : -np 2 "$HPCTRAIN" eval --run "$runs/mpmd" --watch --policy every >/dev/null
cmp <(losses inline) <(losses mpmd) && echo "the same from another program of the job"

# 3. A separate job. It may be started first, and ends when the run does.
"$HPCTRAIN" eval --run "$runs/beside" --watch --policy every >/dev/null &
mpirun -np 2 "$HPCTRAIN" train "${settings[@]}" --set eval.inline=false --set run.name=beside >/dev/null
wait
cmp <(losses inline) <(losses beside) && echo "the same from a job of its own"
