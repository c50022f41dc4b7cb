#!/usr/bin/env bash
# Shows: a job that receives a signal saves, exits with code 75, and resumes with the same results as an uninterrupted run. About 20 seconds.
#
#   examples/07-preempted-and-continued.sh
#
# HPCTRAIN names the program (default ./target/release/hpctrain).
set -euo pipefail
HPCTRAIN=${HPCTRAIN:-./target/release/hpctrain}

export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export OMPI_MCA_rmaps_base_oversubscribe=1 PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe

runs=$(mktemp -d "${TMPDIR:-/tmp}/hpctrain-07.XXXXXX")
settings=(--set "run.root=$runs" --set run.steps=150 --set eval.every=0 --set eval.samples=64 --set parallel.virtual_ranks=2
    --set log.sample_tokens=0)
losses() { sed 's/.*"step":\([0-9]*\),.*"loss":\([^,]*\),.*/\1 \2/' "$runs/$1/metrics.jsonl"; }

mpirun -np 2 "$HPCTRAIN" train "${settings[@]}" --set run.name=whole >/dev/null

# The command that a batch system runs at the first and every later start. mpirun forwards SIGUSR1 to its ranks.
train() { mpirun -np 2 "$HPCTRAIN" train "${settings[@]}" --set run.name=parts --resume auto; }
train >"$runs/first.log" 2>&1 &
until [ "$(wc -l 2>/dev/null <"$runs/parts/metrics.jsonl")" -gt 30 ] 2>/dev/null; do sleep 0.1; done
pkill -USR1 -P $! mpirun || kill -USR1 $!
code=0
wait $! || code=$?
echo "exit code $code, $(wc -l <"$runs/parts/metrics.jsonl") steps done: $(ls "$runs/parts/checkpoints")"
[ "$code" -eq 75 ]

train >"$runs/second.log" 2>&1
cmp <(losses whole) <(losses parts)
echo "all $(losses parts | wc -l) losses are bit-identical to those of the run that was not interrupted"
