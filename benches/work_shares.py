#!/usr/bin/env python3
"""Step times of two ranks of which one has half the speed: equal work, `parallel.work_shares=auto`, and the ideal.

    benches/work_shares.py [--program target/release/hpctrain] [--rounds 5] [--steps 60]

Each rank is bound to a core. The slow one is stopped for half of the time, 2 ms of every 4 ms. Prints the median step of two ranks
of full speed, of a slow one with equal shares and with `auto`, and their ratios to the ideal: 4/3 of the step at full speed, which is
what 1.5 ranks take for the work of two. The first 10 steps do not count.
"""

import argparse
import json
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time

WARM_UP = 10
IDEAL = 2 / 1.5
SLICE = 0.002


def slow_down(started, has_ended):
    """Stops the process whose id the file `started` gets for half of the time, until it has ended."""
    while not started.is_file() or not started.read_text().strip():
        if has_ended.wait(timeout=0.001):
            return
    pid = int(started.read_text())
    try:
        while not has_ended.is_set():
            os.kill(pid, signal.SIGSTOP)
            time.sleep(SLICE)
            os.kill(pid, signal.SIGCONT)
            time.sleep(SLICE)
    except ProcessLookupError:
        pass


def train(arguments, cores, settings, is_slow=False):
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
            own_id = ["sh", "-c", f'echo $$ > {root}/rank-{rank}; exec "$@"', "rank"]
            command += ["-np", "1", "taskset", "-c", str(core), *own_id, arguments.program, *train]
        has_ended = threading.Event()
        slow = threading.Thread(target=slow_down, args=(pathlib.Path(root) / "rank-1", has_ended))
        if is_slow:
            slow.start()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        has_ended.set()
        if is_slow:
            slow.join()
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
    found = {"full speed": [], "equal": [], "auto": []}
    for _ in range(arguments.rounds):
        found["full speed"].append(train(arguments, cores, []))
        found["equal"].append(train(arguments, cores, [], is_slow=True))
        found["auto"].append(train(arguments, cores, ["parallel.work_shares=auto"], is_slow=True))
    for name, times in found.items():
        ratios = [time / (IDEAL * alone) for time, alone in zip(times, found["full speed"])]
        print(f"{name}: step {statistics.median(times):.1f} ms, {statistics.median(ratios):.3f} × the ideal "
              f"({min(ratios):.3f} to {max(ratios):.3f})")


if __name__ == "__main__":
    main()
