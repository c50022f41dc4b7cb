#!/usr/bin/env bash
# Shows: a table of numbers and categories, embedding tables with pairwise dot products, the same bits on two ranks, and a later table
# with the first one's ids and scale. About five seconds.
#
#   examples/10-recommender.sh
#
# HPCTRAIN names the program (default ./target/release/hpctrain).
set -euo pipefail
HPCTRAIN=${HPCTRAIN:-./target/release/hpctrain}

export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export OMPI_MCA_rmaps_base_oversubscribe=1 PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe

work=$(mktemp -d "${TMPDIR:-/tmp}/hpctrain-10.XXXXXX")

# Clicks of readers on sites: each has a position on a circle, and clicks are likelier between neighbours, and at night.
clicks() {
    awk -v seed="$1" -v rows="$2" 'BEGIN {
        print "clicked,hour,reader,site"
        srand(seed)
        for (i = 0; i < rows; i++) {
            reader = int(60 * rand()); site = int(40 * rand()); hour = int(24 * rand())
            near = cos(2 * atan2(0, -1) * (reader / 60 - site / 40)) + (hour < 6 ? 0.5 : -0.1)
            printf "%d,%d,reader-%d,site-%d\n", rand() < 1 / (1 + exp(-4 * near)), hour, reader, site
        }
    }'
}
clicks 7 20000 >"$work/clicks.csv"
"$HPCTRAIN" data import csv "$work/clicks.csv" --target clicked --categorical reader,site --out "$work/data"

cat >"$work/clicks.toml" <<END
[run]
steps = 800
root = "$work/runs"

[model]
kind = "layers"
input = [1]                                      # hour
layers = [
    { kind = "embedding_tables", width = 8, ids = [61, 41], dense = [      # of reader and site
        { kind = "dense", units = 16 },
        { kind = "relu" },
        { kind = "dense", units = 8 },
    ] },
    { kind = "dot_interaction" },
    { kind = "dense", units = 32 },
    { kind = "relu" },
    { kind = "dense", units = 1 },
]

[loss]
kind = "binary-cross-entropy"

[data]
path = "$work/data"

[batch]
global = 128

[optimizer]
lr = 1e-2
weight_decay = 0.01

[parallel]
virtual_ranks = 2

[eval]
every = 400
batch = 1000

[log]
straggler_factor = 0.0   # steps of microseconds differ for no reason
END
"$HPCTRAIN" config summary --config "$work/clicks.toml"
"$HPCTRAIN" train --config "$work/clicks.toml" --set run.name=one
mpirun -np 2 "$HPCTRAIN" train --config "$work/clicks.toml" --set run.name=two --set parallel.zero=3

echo "--- two checkpoints, compared bit by bit"
"$HPCTRAIN" checkpoint diff "$work/runs/one" "$work/runs/two"

# Tomorrow's table: its readers and sites get the ids that they have in the first one, its hours the scale.
clicks 8 500 >"$work/tomorrow.csv"
# Tomorrow's clicks are not known yet, so the first column is cut off.
cut -d, -f2- "$work/tomorrow.csv" >"$work/new.csv"
mpirun -np 2 "$HPCTRAIN" predict --checkpoint "$work/runs/two" --input "$work/new.csv" --keep site --out "$work/predictions.csv"
head -n 5 "$work/predictions.csv"
