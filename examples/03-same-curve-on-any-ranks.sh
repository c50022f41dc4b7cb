#!/usr/bin/env bash
# Shows: with a fixed number of virtual ranks the losses of 1, 2, 3 and 4 ranks are the same to the last bit. About 15 seconds.
#
#   examples/03-same-curve-on-any-ranks.sh
#
# HPCTRAIN names the program (default ./target/release/hpctrain).
set -euo pipefail
HPCTRAIN=${HPCTRAIN:-./target/release/hpctrain}

# Four ranks may be more than there are cores.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export OMPI_MCA_rmaps_base_oversubscribe=1 PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe

runs=$(mktemp -d "${TMPDIR:-/tmp}/hpctrain-03.XXXXXX")

# The batch is divided among four virtual ranks. One rank computes all of them, two ranks two each, three ranks two, one and one, four ranks
# one each; the virtual ranks' gradients are always added in the same order.
for ranks in 1 2 3 4; do
    mpirun -np "$ranks" "$HPCTRAIN" --set run.root="$runs" --set run.name="np$ranks" --set parallel.virtual_ranks=4 \
        --set run.steps=40 --set eval.samples=64 --set log.sample_tokens=0 >/dev/null
    # The text of a number in metrics.jsonl reads back to the same bits, so equal text is equal bits.
    sed 's/.*"step":\([0-9]*\),.*"loss":\([^,]*\),.*/\1 \2/' "$runs/np$ranks/metrics.jsonl" >"$runs/np$ranks.losses"
    echo "$ranks ranks: last loss $(tail -n 1 "$runs/np$ranks.losses" | cut -d ' ' -f 2)"
done

for ranks in 2 3 4; do
    cmp "$runs/np1.losses" "$runs/np$ranks.losses"
done
echo "all $(wc -l <"$runs/np1.losses") losses are bit-identical on 1, 2, 3 and 4 ranks"
