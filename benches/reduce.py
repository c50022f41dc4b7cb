#!/usr/bin/env python3
"""Step times of gradients that are reduced over shards once per step, and after each micro-batch.

    benches/reduce.py [--program target/release/hpctrain] [--rounds 5] [--rate 1gbit] [--micros 8] [--width 256]

Two ranks of one thread each train a GPT with ZeRO 2 and 3, in turn with `parallel.reduce` step and micro, and with the same
virtual ranks, so that the bits are the same. With --rate they are on two hosts (scripts/hosts; root and iproute2) whose network
has that rate. Prints medians over the rounds: the step, the communication that compute does not hide, and the peak of gradients.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import tempfile

SCRIPT = pathlib.Path(__file__).resolve().parent.parent / "scripts" / "hosts"
STEPS, WARM_UP = 14, 4


def train(program, root, name, zero, reduce, options):
    """The medians of a run's steps, and its peak of gradients in MiB."""
    keys = {
        "run.root": root, "run.name": name, "run.steps": STEPS, "run.threads": 1, "model.width": options.width,
        "parallel.zero": zero, "parallel.reduce": reduce, "parallel.virtual_ranks": 2 * options.micros,
        "batch.global": 2 * options.micros * options.samples, "batch.micro": options.samples,
        "eval.every": 0, "eval.samples": 1, "checkpoint.every": 0, "log.sample_tokens": 0,
    }
    start = [SCRIPT, "mpirun", "h0:1,h1:1"] if options.rate else ["mpirun", "-np", "2"]
    words = [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]
    subprocess.run([*start, program, "train", *words], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    run = pathlib.Path(root) / name
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()][WARM_UP:]
    record = json.loads((run / "run.json").read_text())
    median = [statistics.median(step[key] for step in steps) for key in ("step_ms", "comm_exposed_ms")]
    return *median, record["peak_bytes"]["gradients"] / 2**20, [step["loss"] for step in steps]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", default="target/release/hpctrain")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rate", help="rate of the network between two hosts, such as 1gbit")
    parser.add_argument("--micros", type=int, default=8, help="micro-batches per rank and step")
    parser.add_argument("--samples", type=int, default=2, help="samples of a micro-batch")
    parser.add_argument("--width", type=int, default=256)
    options = parser.parse_args()
    program = str(pathlib.Path(options.program).resolve())

    rows = {(zero, reduce): [] for zero in (2, 3) for reduce in ("step", "micro")}
    if options.rate:
        subprocess.run([SCRIPT, "up", "2"], check=True)
    try:
        for host in ("h0", "h1") if options.rate else ():
            subprocess.run([SCRIPT, "rate", host, options.rate], check=True)
        for number in range(options.rounds):
            # In turn, so that a change of the machine's speed meets both equally.
            for zero, reduce in rows:
                with tempfile.TemporaryDirectory() as root:
                    rows[zero, reduce].append(train(program, root, f"{zero}-{reduce}-{number}", zero, reduce, options))
    finally:
        if options.rate:
            subprocess.run([SCRIPT, "down"], check=True)
    print("ZeRO  reduce  step ms  / step  exposed ms  gradients MiB")
    for (zero, reduce), rounds in rows.items():
        base = rows[zero, "step"]
        assert all(one[3] == other[3] for one, other in zip(rounds, base)), "other losses"
        step, exposed, peak = (statistics.median(one[k] for one in rounds) for k in range(3))
        ratio = statistics.median(one[0] / other[0] for one, other in zip(rounds, base))
        print(f"{zero:4}  {reduce:6}  {step:7.1f}  {ratio:6.3f}  {exposed:10.1f}  {peak:13.2f}")


if __name__ == "__main__":
    main()
