#!/usr/bin/env bash
# Shows: a table of numbers, a layer-list model that learns two of its columns, the same bits on two ranks, predictions.
# About five seconds.
#
#   examples/09-own-table.sh
#
# HPCTRAIN names the program (default ./target/release/hpctrain).
set -euo pipefail
HPCTRAIN=${HPCTRAIN:-./target/release/hpctrain}

export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
export OMPI_MCA_rmaps_base_oversubscribe=1 PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe

work=$(mktemp -d "${TMPDIR:-/tmp}/hpctrain-09.XXXXXX")

# The distance and the height that a stone reaches when thrown with a given speed (m/s) and angle (degrees).
awk 'BEGIN {
    print "speed,angle,distance,height"
    srand(7)
    for (i = 0; i < 4000; i++) {
        speed = 5 + 20 * rand(); angle = 10 + 70 * rand(); turn = angle * atan2(0, -1) / 180
        printf "%.4f,%.4f,%.4f,%.4f\n", speed, angle, speed^2 * sin(2 * turn) / 9.81, (speed * sin(turn))^2 / 19.62
    }
}' >"$work/throws.csv"
"$HPCTRAIN" data import csv "$work/throws.csv" --target distance --target height --out "$work/data"

cat >"$work/throws.toml" <<END
[run]
steps = 600
root = "$work/runs"

[model]
kind = "layers"
input = [2]
layers = [
    { kind = "dense", units = 64 },
    { kind = "silu" },
    { kind = "residual", layers = [{ kind = "dense", units = 64 }, { kind = "silu" }] },
    { kind = "dense", units = 2 },
]

[loss]
kind = "mse"

[data]
path = "$work/data"

[batch]
global = 64

[optimizer]
lr = 1e-2
weight_decay = 0.0

[lr_schedule]
warmup = 20

[parallel]
virtual_ranks = 2

[eval]
every = 200
batch = 100

[log]
straggler_factor = 0.0   # steps of microseconds differ for no reason
END
"$HPCTRAIN" config summary --config "$work/throws.toml"
"$HPCTRAIN" train --config "$work/throws.toml" --set run.name=one
mpirun -np 2 "$HPCTRAIN" train --config "$work/throws.toml" --set run.name=two --set parallel.zero=3

mpirun -np 2 "$HPCTRAIN" predict --checkpoint "$work/runs/two" --input "$work/data" --out "$work/predictions.h5"
"$HPCTRAIN" data inspect "$work/predictions.h5"

echo "--- two checkpoints, compared bit by bit"
"$HPCTRAIN" checkpoint diff "$work/runs/one" "$work/runs/two"
