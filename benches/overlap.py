#!/usr/bin/env python3
"""How much of the communication compute hides, for every ZeRO stage.

Two ranks of one thread each train a GPT of width 512. By default each has a core to itself, which compute and
messages share. With --spare-core all compute threads share the first core and all communication threads have the
second: compute takes twice as long, and messages cost it no core.
"""

import argparse
import json
import os
import statistics
import subprocess
import tempfile
import time
from pathlib import Path


def threads_of(pid):
    """Thread ids and names of a process and all its descendants."""
    for task in Path(f"/proc/{pid}/task").glob("*"):
        try:
            yield int(task.name), (task / "comm").read_text().strip()
            children = (task / "children").read_text().split()
        except OSError:
            continue
        for child in children:
            yield from threads_of(int(child))


def pin(pid):
    """Communication threads to the second core, all others to the first."""
    for thread, name in threads_of(pid):
        try:
            os.sched_setaffinity(thread, {1 if name == "comm" else 0})
        except OSError:
            pass


def run(program, zero, steps, width, spare):
    with tempfile.TemporaryDirectory() as root:
        settings = {
            "model.width": width, "parallel.zero": zero, "run.steps": steps, "run.threads": 1, "run.root": root,
            "run.name": "x", "eval.every": 0, "eval.samples": 4, "checkpoint.every": 0, "log.sample_tokens": 0,
        }
        command = ["mpirun", "-np", "2"] + (["--bind-to", "none"] if spare else []) + [program]
        command += [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
        job = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        while job.poll() is None:
            if spare:
                pin(job.pid)
            time.sleep(0.05)
        if job.returncode:
            raise SystemExit(f"{command} ended with {job.returncode}")
        lines = Path(root, "x", "metrics.jsonl").read_text().splitlines()
    # The first steps touch memory for the first time, and threads may not be pinned yet.
    return [json.loads(line) for line in lines[4:]]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--program", default="target/release/hpctrain")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--spare-core", action="store_true")
    options = parser.parse_args()
    program = str(Path(options.program).resolve())

    stages = range(4)
    rows = {zero: [] for zero in stages}
    for _ in range(options.rounds):
        # In turn, so that a change of the machine's speed meets all alike.
        for zero in stages:
            rows[zero].append(run(program, zero, options.steps, options.width, options.spare_core))
    middle = lambda key, steps: statistics.median(step[key] for step in steps)
    print("ZeRO  step ms  / ZeRO 0  exposed ms  hidden ms  exposed / all communication")
    for zero in stages:
        of_round = [middle("step_ms", steps) for steps in rows[zero]]
        ratios = [middle("step_ms", steps) / middle("step_ms", base) for steps, base in zip(rows[zero], rows[0])]
        steps = [step for round in rows[zero] for step in round]
        exposed, hidden = middle("comm_exposed_ms", steps), middle("comm_hidden_ms", steps)
        share = exposed / (exposed + hidden)
        print(f"{zero:4}  {statistics.median(of_round):7.1f}  {statistics.median(ratios):8.2f}  {exposed:10.1f}"
              f"  {hidden:9.1f}  {share:8.0%}")


if __name__ == "__main__":
    main()
