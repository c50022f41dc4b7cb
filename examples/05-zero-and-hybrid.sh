#!/usr/bin/env bash
# Shows: ZeRO stages and hybrid sharding change what each rank stores, but not the losses. About 25 seconds.
#
#   examples/05-zero-and-hybrid.sh
#
# HPCTRAIN names the program (default ./target/release/hpctrain).
set -euo pipefail
HPCTRAIN=${HPCTRAIN:-./target/release/hpctrain}

runs=$(mktemp -d "${TMPDIR:-/tmp}/hpctrain-05.XXXXXX")

# `simulate` runs the four ranks as threads of one process: the same program without mpirun. For processes replace
# `simulate --ranks 4` by `train` under `mpirun -np 4`.
train() {
    local name=$1
    shift
    "$HPCTRAIN" simulate --ranks 4 --set run.root="$runs" --set run.name="$name" --set parallel.virtual_ranks=4 \
        --set run.steps=20 --set eval.samples=64 --set log.sample_tokens=0 "$@" >"$runs/$name.out"
    sed 's/.*"step":\([0-9]*\),.*"loss":\([^,]*\),.*/\1 \2/' "$runs/$name/metrics.jsonl" >"$runs/$name.losses"
    cmp "$runs/ddp.losses" "$runs/$name.losses"
    printf '%-8s last loss %s\n' "$name" "$(tail -n 1 "$runs/$name.losses" | cut -d ' ' -f 2)"
    grep '^memory' "$runs/$name.out"
}

train ddp --set parallel.zero=0                                            # everything on every rank
train zero1 --set parallel.zero=1                                          # a quarter of the optimizer state
train zero2 --set parallel.zero=2                                          # and of the gradients
train zero3 --set parallel.zero=3                                          # and of the parameters
train hybrid --set parallel.zero=3 --set parallel.shard=2 --set parallel.replica=2   # two copies, two shards each
echo "all losses are bit-identical"
