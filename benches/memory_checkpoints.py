#!/usr/bin/env python3
"""Step times of runs with in-memory checkpoints, relative to runs without them.

    benches/memory_checkpoints.py [--program target/release/hpctrain] [--pairs 5] [--ranks 2] [--steps 300]
        [--set batch.global=64] [--every 1,auto]

Runs of the preset gpt-char on one machine take turns: without copies, and with each value of `memory_checkpoint.every`. Prints for
each value the median of the ratios of all pairs, with the least and the greatest: of the median step, and of the mean step, which
counts the copies of `auto`, too. The first 30 steps do not count.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import tempfile

WARM_UP = 30


def train(arguments, every):
    """The median and the mean time of the steps, and the median time of their updates, in milliseconds."""
    with tempfile.TemporaryDirectory() as root:
        settings = [
            f"run.steps={arguments.steps}", f"run.root={root}", "run.name=x", "eval.every=0", "eval.samples=16",
            "checkpoint.every=100000", "log.sample_tokens=0", *arguments.set,
            *([f"memory_checkpoint.every={every}"] if every else []),
        ]
        command = ["mpirun", "-np", str(arguments.ranks), arguments.program, "train", "--preset", "gpt-char"]
        command += [word for setting in settings for word in ("--set", setting)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        lines = (pathlib.Path(root) / "x" / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines][WARM_UP:]
    times = [step["step_ms"] for step in steps]
    return statistics.median(times), statistics.mean(times), statistics.median(step["optimizer_ms"] for step in steps)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", default="target/release/hpctrain")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--set", action="append", default=[], help="another setting of all runs")
    parser.add_argument("--every", default="1,auto", type=lambda values: values.split(","))
    arguments = parser.parse_args()
    ways = ["", *arguments.every]
    found = {every: [] for every in ways}
    for pair in range(arguments.pairs):
        # The one that begins changes from pair to pair.
        first = pair % len(ways)
        for every in ways[first:] + ways[:first]:
            found[every].append(train(arguments, every))
    for every in ways:
        median, mean, update = (statistics.median(column) for column in zip(*found[every]))
        line = f"every={every or 0}: step {median:.2f} ms, mean {mean:.2f} ms, update {update:.2f} ms"
        for name, column in (("median", 0), ("mean", 1)) if every else ():
            ratios = [with_[column] / without[column] for with_, without in zip(found[every], found[""])]
            line += f"; {name} {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
        print(line, flush=True)


if __name__ == "__main__":
    main()
