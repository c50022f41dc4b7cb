#!/usr/bin/env python3
"""The accuracy of `hpctrain plan --measure`: all layouts of three networks on two ranks, predicted and run.

    benches/plan_accuracy.py [--program target/release/hpctrain] [--ranks 2] [--runs 5] [--mpirun "mpirun --bind-to none -np"]

Everything is done several times; medians count. Prints a line for each layout, and for each network the time of the proposed
layout over the best measured one, Spearman's correlation of the orders, the pairs of layouts in the right order among those
whose times differ by more than 3 %, the median error of the time and the largest of the memory.
"""

import argparse
import itertools
import json
import statistics
import subprocess
import sys

NETWORKS = {
    "head-heavy": "model.layers=2 model.width=128 model.heads=4 model.context=64 model.vocabulary=8192 batch.global=16",
    "deep": "model.layers=12 model.width=128 model.heads=4 model.context=64 model.vocabulary=128 batch.global=32",
    "wide": "model.layers=2 model.width=512 model.heads=8 model.context=64 model.vocabulary=128 batch.global=16",
}


KEYS = ("pipeline", "schedule", "tensor", "sequence", "zero", "micro")


def ranks_of(values):
    """Places in the order of values, ties shared."""
    order = sorted(values)
    return [(order.index(value) + len(order) - 1 - order[::-1].index(value)) / 2 for value in values]


def spearman(one, other):
    return statistics.correlation(ranks_of(one), ranks_of(other))


def in_order(predicted, measured):
    """Pairs in the right order, and all, of those that differ by more than 3 %."""
    pairs = [
        (one[0] < other[0]) == (one[1] < other[1])
        for one, other in itertools.combinations(zip(predicted, measured), 2)
        if max(one[1], other[1]) > 1.03 * min(one[1], other[1])
    ]
    return sum(pairs), len(pairs)


def layouts_of(command):
    """What the command prints of its layouts, by the keys of each."""
    run = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    if run.returncode:
        sys.exit(f"{' '.join(command)}: exit code {run.returncode}")
    return {tuple(layout[key] for key in KEYS): layout for layout in json.loads(run.stdout)["layouts"]}


def medians(runs):
    """The layouts of the first run, with medians of all for times, in the order of measured ones."""
    layouts = runs[0]
    for key, layout in layouts.items():
        layout["step_ms"] = statistics.median(run[key]["step_ms"] for run in runs)
        layout["tried"]["step_ms"] = statistics.median(run[key]["tried"]["step_ms"] for run in runs)
    return sorted(layouts.values(), key=lambda layout: layout["tried"]["step_ms"])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", default="target/release/hpctrain")
    parser.add_argument("--mpirun", default="mpirun --bind-to none -np")
    parser.add_argument("--ranks", default="2")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--micro", default="4", help="samples of a micro-batch; empty tries several")
    arguments = parser.parse_args()
    for name, settings in NETWORKS.items():
        settings = settings.split() + ["run.threads=1", "eval.batch=1"] + ([f"batch.micro={arguments.micro}"] if arguments.micro else [])
        command = arguments.mpirun.split() + [arguments.ranks, arguments.program, "plan", "--measure", "--try", "1000", "--json"]
        command += [part for setting in settings for part in ("--set", setting)]
        layouts = medians([layouts_of(command) for _ in range(arguments.runs)])
        print(f"\n{name}: {len(layouts)} layouts")
        for layout in layouts:
            predicted, tried = layout["step_ms"], layout["tried"]
            told = " ".join(f"{key} {layout[key]}" for key in KEYS)
            memory = tried["estimated_bytes"] / tried["counted_bytes"] - 1
            off = predicted / tried["step_ms"] - 1
            print(f"  {told}: {predicted:.2f} ms predicted, {tried['step_ms']:.2f} ms measured, {off:+.1%}; memory {memory:+.1%}")
        predicted = [layout["step_ms"] for layout in layouts]
        measured = [layout["tried"]["step_ms"] for layout in layouts]
        first = measured[predicted.index(min(predicted))] / min(measured)
        errors = [abs(one / other - 1) for one, other in zip(predicted, measured)]
        memory = [abs(one["tried"]["estimated_bytes"] / one["tried"]["counted_bytes"] - 1) for one in layouts]
        right, all_pairs = in_order(predicted, measured)
        print(
            f"  first/best {first:.3f}, Spearman {spearman(predicted, measured):.3f}, {right} of {all_pairs} pairs in order, "
            f"median error {statistics.median(errors):.1%}, memory at most {max(memory):.1%}"
        )


if __name__ == "__main__":
    main()
