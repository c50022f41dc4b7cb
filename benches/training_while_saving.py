#!/usr/bin/env python3
"""How much slower a step is while a checkpoint of the step before is being written.

    python benches/training_while_saving.py --dir /tmp

One rank trains a network of some 500 MB of parameters and optimizer state with one compute thread, so that a second core
is free for the writer, and saves every fifth step. Steps that begin while a checkpoint is written are compared with the
others of the same run: the trace says which. A save that is written while training waits (checkpoint.async_save=false)
shows what is gained.
"""

import argparse
import json
import os
import statistics
import subprocess
import tempfile

EVERY = 5


def run(program, folder, steps, asynchronous):
    with tempfile.TemporaryDirectory(dir=folder) as root:
        trace = os.path.join(root, "trace.json")
        settings = {
            "model.layers": 13, "model.width": 512, "model.heads": 8, "batch.global": 4, "run.steps": steps,
            "run.threads": 1, "run.root": root, "run.name": "x", "eval.every": 0, "eval.samples": 4, "log.sample_tokens": 0,
            "checkpoint.every": EVERY, "checkpoint.keep": 1, "checkpoint.async_save": str(asynchronous).lower(),
        }
        command = [program, "train", "--trace", trace]
        command += [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        with open(os.path.join(root, "x", "metrics.jsonl")) as lines:
            steps = [json.loads(line) for line in lines]
        with open(trace) as file:
            events = json.load(file)
    events = events["traceEvents"] if isinstance(events, dict) else events
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e.get("name") == "thread_name"}
    of = lambda track: [e for e in events if e.get("ph") == "X" and names.get((e["pid"], e["tid"])) == track]
    saving = [(e["ts"], e["ts"] + e["dur"]) for e in of("saver") if e["name"] == "checkpoint"]
    stalls = [e["dur"] / 1e3 for e in of("compute") if e["name"] == "checkpoint"]
    # A step begins with the forward of its first block.
    starts = [e["ts"] for e in of("compute") if e["name"] == "forward embedding"]
    return steps, starts, saving, stalls


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", default="./target/release/hpctrain")
    parser.add_argument("--dir", default=".")
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    for asynchronous in (True, False):
        steps, starts, saving, stalls = run(args.program, args.dir, args.steps, asynchronous)
        beside, alone = [], []
        for step, start in list(zip(steps, starts))[EVERY:]:
            duration = step["step_ms"]
            begin, end = start, start + duration * 1e3
            overlap = sum(max(0, min(end, b) - max(begin, a)) for a, b in saving) / (end - begin)
            if overlap > 0.5:
                beside.append(duration)
            elif overlap == 0:
                alone.append(duration)
        print(f"asynchronous={asynchronous}: training waits {statistics.median(stalls):.1f} ms for a save")
        print(f"  step by itself {statistics.median(alone):.1f} ms ({len(alone)} steps)")
        if beside:
            during = statistics.median(beside)
            print(f"  step while a checkpoint is written {during:.1f} ms ({len(beside)} steps)")
            print(f"  throughput meanwhile {statistics.median(alone) / during:.2f} of that without")


if __name__ == "__main__":
    main()
