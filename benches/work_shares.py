#!/usr/bin/env python3
"""Step times of two ranks of which one has half a core: equal work, `parallel.work_shares=auto`, and the ideal.

    benches/work_shares.py [--program target/release/hpctrain] [--rounds 5] [--steps 60]

Each rank is bound to a core; on the core of the second one a process computes all the time. Prints the median step of two undisturbed
ranks, of a disturbed one with equal shares and with `auto`, and their ratios to the ideal: 4/3 of the undisturbed step, which is what
1.5 cores take for the work of two. The first 10 steps do not count.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

WARM_UP = 10
IDEAL = 2 / 1.5


def train(arguments, cores, settings):
    """The median time of the steps in milliseconds."""
    with tempfile.TemporaryDirectory() as root:
        keys = [
            f"run.steps={arguments.steps}", f"run.root={root}", "run.name=x", "eval.every=0", "eval.samples=16",
            "checkpoint.every=100000", "log.sample_tokens=0", "parallel.virtual_ranks=24", "batch.global=96", *settings,
        ]
        train = ["train", "--preset", "gpt-char"] + [word for key in keys for word in ("--set", key)]
        command = ["mpirun", "--bind-to", "none"]
        for rank, core in enumerate(cores):
            command += [":"] if rank else []
            command += ["-np", "1", "taskset", "-c", str(core), arguments.program, *train]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        lines = (pathlib.Path(root) / "x" / "metrics.jsonl").read_text().splitlines()
    return statistics.median(json.loads(line)["step_ms"] for line in lines[WARM_UP:])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", default="target/release/hpctrain")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60)
    arguments = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        sys.exit("work_shares: two cores are needed")
    found = {"undisturbed": [], "equal": [], "auto": []}
    for _ in range(arguments.rounds):
        found["undisturbed"].append(train(arguments, cores, []))
        busy = subprocess.Popen(["taskset", "-c", str(cores[1]), sys.executable, "-c", "while True: pass"])
        try:
            found["equal"].append(train(arguments, cores, []))
            found["auto"].append(train(arguments, cores, ["parallel.work_shares=auto"]))
        finally:
            busy.kill()
            busy.wait()
    for name, times in found.items():
        ratios = [time / (IDEAL * alone) for time, alone in zip(times, found["undisturbed"])]
        print(f"{name}: step {statistics.median(times):.1f} ms, {statistics.median(ratios):.3f} × the ideal "
              f"({min(ratios):.3f} to {max(ratios):.3f})")


if __name__ == "__main__":
    main()
