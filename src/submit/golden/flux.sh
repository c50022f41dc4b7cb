#!/usr/bin/env bash
# Written by hpctrain submit: 2 nodes × 2 ranks, one GPU each.
# pipeline 1 × replica 4 × shard 1 × tensor 1, ZeRO 0, micro-batches of 8; a rank needs 90 MiB of memory

#flux: --job-name=small
#flux: --nodes=2
#flux: --nslots=4
#flux: --cores-per-slot=4
#flux: --gpus-per-slot=1
#flux: --time-limit=14400s
#flux: --queue=gpu
#flux: --bank=proj-1
#flux: --signal=SIGUSR1@120s
#flux: --output=small-{{id}}.log

set -euo pipefail
trap : USR1
cd '/home/me/my project'
# Scripts of environment modules read variables that are not set.
set +u
module load gcc/13 openmpi
export NCCL_DEBUG=INFO
set -u
# Lustre and NFS without a lock service refuse HDF5's locks, which protect nothing here.
export HDF5_USE_FILE_LOCKING=FALSE

hpctrain=/opt/hpctrain/bin/hpctrain
# The name stays the same after a requeue.
run_name=${RUN_NAME:-small-$(flux job id --to=dec "$(flux getattr jobid)")}
restarts=${RESTARTS:-0}
nodes=$(flux getattr hostlist)
launch=(flux run -N2 -n4 -c4 -g1 -o cpu-affinity=per-task -o gpu-affinity=on -o pmi=pmix)
doctor=(--require-gpus --run-root runs)
train=(--config my.toml --set run.steps=500 --set run.name="$run_name" --resume auto)
# The run saves and ends 120 seconds before the time limit.
export deadline=$(($(date +%s) + 14280))
start=(bash -c 'left=$((deadline - $(date +%s))); exec "$@" --set run.time_limit="$((left > 0 ? left : 1))s"' start "${launch[@]}")

requeue() {
    RUN_NAME=$run_name RESTARTS=$((restarts + 1)) flux --parent batch "$0"
}
# A job that is always interrupted for the same reason is not requeued for ever.
may_retry() { [ "$restarts" -lt 5 ]; }

# All ranks check their nodes, started as those that train.
code=0
findings=$("${launch[@]}" "$hpctrain" doctor "${doctor[@]}") || code=$?
printf '%s\n' "$findings"
if [ "$code" -eq 75 ]; then
    # A signal came: the job was preempted before it trained.
    ! may_retry || requeue
    exit "$code"
elif [ "$code" -ne 0 ]; then
    grep -A 1 '^✗' <<<"$findings" >&2 || true
    echo "preflight failed: hpctrain doctor ended with code $code on $nodes; nothing was trained" >&2
    exit "$code"
fi

# --resume auto starts the run if it has no checkpoint. After a crash supervise starts the ranks again in this job.
code=0
"$hpctrain" supervise --requeue -- "${start[@]}" "$hpctrain" train "${train[@]}" || code=$?
# 75: saved, to be continued. 74: the file system failed for too long.
if [ "$code" -eq 75 ] || { [ "$code" -eq 74 ] && may_retry; }; then
    requeue
fi
exit "$code"
