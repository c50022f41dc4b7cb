#!/usr/bin/env python3
"""Runs on parameter servers with one worker that stops nine tenths of the time, beside runs without it.

    benches/servers.py [--program target/release/hpctrain] [--runs 5]

For each staleness, prints the samples a second (median of the runs, spread) of three workers of which one stops, and of the two
others alone, and their ratio. All on this machine: one server, one compute thread a process.
"""

import argparse
import json
import os
import pathlib
import signal
import statistics
import subprocess
import tempfile
import time

SETTINGS = ["--preset", "gpt-char", "--set", "eval.every=0", "--set", "eval.samples=16", "--set", "checkpoint.every=0",
            "--set", "run.threads=1"]


def once(program, staleness, workers, stops, steps):
    """Samples a second of a run."""
    with tempfile.TemporaryDirectory() as root:
        run = pathlib.Path(root) / "x"
        own = ["batch.worker=8"] if staleness != "0" else ["parallel.virtual_ranks=6"]
        settings = [*SETTINGS, *(word for key in own for word in ("--set", key))]
        command = [program, "ps", "coordinator", "--servers", "1", "--workers", str(workers), *settings,
                   "--set", f"parameter_server.staleness={staleness}", "--set", f"batch.global={8 * workers if staleness != '0' else 24}",
                   "--set", f"run.root={root}", "--set", "run.name=x", "--set", f"run.steps={steps}"]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        coordinator = subprocess.Popen(command, **quiet)
        others = [subprocess.Popen([program, "ps", role, "--run", str(run)], **quiet)
                  for role in ["server"] + ["worker"] * workers]
        slow, stopped = others[-1], False
        while coordinator.poll() is None:
            if stops:
                # A tenth of each second it runs.
                stopped = not stopped
                os.kill(slow.pid, signal.SIGSTOP if stopped else signal.SIGCONT)
                time.sleep(0.9 if stopped else 0.1)
            else:
                time.sleep(0.1)
        if stopped:
            os.kill(slow.pid, signal.SIGCONT)
        for other in others:
            other.wait()
        if coordinator.returncode:
            raise SystemExit(f"{' '.join(command)}: exit code {coordinator.returncode}")
        times = [json.loads(line)["time"] for line in (run / "metrics.jsonl").read_text().splitlines()]
        # The first steps are those of processes that start.
        first = len(times) // 5
        return (len(times) - 1 - first) * (8 * workers if staleness != '0' else 24) / (times[-1] - times[first])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", default="target/release/hpctrain")
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args()
    # Where others wait for it, fewer steps take long enough.
    for staleness, steps in [('"none"', 200), ("4", 60), ("0", 60)]:
        found = {True: [], False: []}
        for _ in range(arguments.runs):
            for stops in (True, False):
                workers = 3 if stops else 2
                found[stops].append(once(arguments.program, staleness, workers, stops, steps))
        told = {stops: f"{statistics.median(rates):.0f} ({min(rates):.0f} to {max(rates):.0f})" for stops, rates in found.items()}
        ratio = statistics.median(found[True]) / statistics.median(found[False])
        print(f"staleness {staleness}: {told[True]} samples/s with one that stops, {told[False]} of the two others alone: {ratio:.2f}",
              flush=True)


if __name__ == "__main__":
    main()
