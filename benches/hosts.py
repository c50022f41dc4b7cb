#!/usr/bin/env python3
"""Step times of two ranks on two hosts, by the rate of the network between them, beside the least that compute and bytes allow.

    benches/hosts.py [--program target/release/hpctrain] [--rounds 5] [--rates 10gbit,1gbit,200mbit] [--zero 0,1,3]
                     [--congestion cubic] [--set parallel.virtual_ranks=2]

The hosts are network namespaces of this machine (scripts/hosts; root and iproute2), with a core each where it has two; the rate is
that of `tc tbf` on both ends of each cable. TCP's congestion control is CUBIC, as on most systems, or the one named. Every round
trains the bundled default for 40 steps once for each rate and stage of ZeRO, in turn. Prints the median step over the rounds'
medians (and their range), and its ratio to two limits:

- max(compute, bytes / rate), with the compute, optimizer and loader of the same stage at the fastest rate, and the bytes that a rank
  must send: 2 (n - 1)/n of the gradients or parameters in stages 0 and 1, 3 (n - 1)/n in stage 3;
- for stage 0 also what the order of work allows: no byte of a gradient leaves before the first backward ends, and no update begins
  before the last has come, so that only the backwards of the other blocks lie beside the bytes. The parts are those of a trace.
"""

import argparse
import json
import os
import pathlib
import platform
import re
import statistics
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).resolve().parent.parent
SCRIPT = HERE / "scripts" / "hosts"
STEPS, WARM_UP = 40, 10
# Bytes of the parameters that each step sends, in units of (n - 1)/n of all of them.
MESSAGES = {0: 2, 1: 2, 2: 2, 3: 3}
UNITS = {"gbit": 1e9, "mbit": 1e6}


def bytes_a_second(rate):
    number, unit = re.fullmatch(r"([0-9.]+)(gbit|mbit)", rate).groups()
    return float(number) * UNITS[unit] / 8


def hosts(*arguments, **options):
    return subprocess.run([SCRIPT, *arguments], check=True, text=True, **options)


def train(program, root, name, zero, settings, trace=None):
    """The medians of a run's steps: all of it, and the part that is no communication, in milliseconds; and its parameters."""
    words = [program, "train", *(["--trace", trace] if trace else [])]
    keys = [f"run.root={root}", f"run.name={name}", f"run.steps={STEPS}", f"parallel.zero={zero}", "run.threads=1"]
    keys += ["eval.every=0", "eval.samples=1", "checkpoint.every=0", "log.sample_tokens=0", *settings]
    for key in keys:
        words += ["--set", key]
    hosts("mpirun", "h0:1,h1:1", *words, stdout=subprocess.DEVNULL)
    run = pathlib.Path(root) / name
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()][WARM_UP:]
    parts = [step["compute_ms"] + step["optimizer_ms"] + step["loader_ms"] for step in steps]
    parameters = json.loads((run / "run.json").read_text())["parameters"]
    return statistics.median(step["step_ms"] for step in steps), statistics.median(parts), parameters


def before_the_first_byte(path):
    """Of a trace of stage 0: the median milliseconds of a step before its first all-reduce begins, and after its last has ended."""
    events = [e for e in json.loads(pathlib.Path(path).read_text())["traceEvents"] if e.get("pid") == 0 and e["ph"] == "X"]
    forwards = sorted(e["ts"] for e in events if e["cat"] == "forward" and e["args"]["unit"] == "embedding")
    sums = [e for e in events if e["cat"] == "all_reduce"]
    before, after = [], []
    for begun, next_one in zip(forwards[WARM_UP:], forwards[WARM_UP + 1 :]):
        inside = [e for e in sums if begun <= e["ts"] < next_one]
        before.append(min(e["ts"] for e in inside) - begun)
        after.append(next_one - max(e["ts"] + e["dur"] for e in inside))
    return statistics.median(before) / 1e3, statistics.median(after) / 1e3


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", default=str(HERE / "target/release/hpctrain"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rates", default="10gbit,1gbit,200mbit")
    parser.add_argument("--zero", default="0,1,3")
    parser.add_argument("--congestion", default="cubic", help="TCP's congestion control: cubic, bbr, reno")
    parser.add_argument("--set", action="append", default=[], dest="settings", metavar="KEY=VALUE")
    arguments = parser.parse_args()
    rates = sorted(arguments.rates.split(","), key=bytes_a_second, reverse=True)
    stages = [int(zero) for zero in arguments.zero.split(",")]
    if subprocess.run([SCRIPT, "check"]).returncode != 0:
        sys.exit("hosts.py: no hosts can be made here")
    with tempfile.TemporaryDirectory() as root:
        os.environ["HPCTRAIN_HOSTS"] = f"{root}/hosts"
        hosts("up", "2")
        try:
            for host in ("h0", "h1"):
                hosts("run", host, "sysctl", "-qw", f"net.ipv4.tcp_congestion_control={arguments.congestion}")
            measure(arguments, root, rates, stages)
        finally:
            hosts("down")


def measure(arguments, root, rates, stages):
    program = str(pathlib.Path(arguments.program).resolve())
    times = {(rate, zero): [] for rate in rates for zero in stages}
    own = {zero: [] for zero in stages}
    edges = []
    parameters = 0
    for number in range(arguments.rounds):
        for rate in rates:
            for host in ("h0", "h1"):
                hosts("rate", host, rate)
            for zero in stages:
                name = f"{number}-{rate}-{zero}"
                trace = f"{root}/trace.json" if zero == 0 and rate == rates[-1] else None
                step, parts, parameters = train(program, root, name, zero, arguments.settings, trace)
                times[rate, zero].append(step)
                if rate == rates[0]:
                    own[zero].append(parts)
                if trace:
                    edges.append(before_the_first_byte(trace))
                print(f"round {number + 1}, {rate}, ZeRO {zero}: {step:.1f} ms", file=sys.stderr, flush=True)
    model = next((line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")), "unknown CPU")
    print(f"{model}, {os.cpu_count()} cores, Linux {platform.release()}, TCP with {arguments.congestion}, {arguments.rounds} rounds\n")
    print("| rate | ZeRO | step, ms | compute, ms | bytes / rate, ms | step / limit |")
    print("|---|---|---|---|---|---|")
    for rate in rates:
        for zero in stages:
            steps, compute = times[rate, zero], statistics.median(own[zero])
            sent = MESSAGES[zero] * parameters * 4 / 2 / bytes_a_second(rate) * 1e3
            step = statistics.median(steps)
            ratio = step / max(compute, sent)
            spread = f"{min(steps):.0f} to {max(steps):.0f}"
            print(f"| {rate} | {zero} | {step:.0f} ({spread}) | {compute:.0f} | {sent:.0f} | {ratio:.2f} |")
    if edges:
        before, after = (statistics.median(edge) for edge in zip(*edges))
        sent = 2 * parameters * 4 / 2 / bytes_a_second(rates[-1]) * 1e3
        step = statistics.median(times[rates[-1], 0])
        least = before + sent + after
        print(f"\nZeRO 0 at {rates[-1]}: {before:.0f} ms before the first byte + {sent:.0f} ms of bytes + {after:.0f} ms after the", end=" ")
        print(f"last one = {least:.0f} ms; step / that = {step / least:.2f}")


if __name__ == "__main__":
    main()
