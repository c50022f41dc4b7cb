#!/usr/bin/env python3
"""The idle part of a pipeline's steps, from a trace: benches/bubble.py TRACE STAGES MICRO_BATCHES.

Two figures for each step but the first: *played* has the measured forwards and backwards of every stage in the order of
one forward, one backward, with messages that take no time and a core for each rank; *traced* is what the ranks of the
trace were idle between the first forward and the last backward of a step. Prints the medians. Made with:

    mpirun -np 2 --bind-to none hpctrain train --set parallel.pipeline=2 --set run.threads=1 --set batch.micro=1 \\
        --set batch.global=8 --set run.steps=30 --trace trace.json
"""
import json
import statistics
import sys
from collections import defaultdict


def order(stage, stages, micros):
    """The computations of a stage: 'F' or 'B' with a micro-batch (Narayanan et al., 2019)."""
    ahead = min(stages - 1 - stage, micros)
    computations = [("F", k) for k in range(ahead)]
    for k in range(micros - ahead):
        computations += [("F", ahead + k), ("B", k)]
    return computations + [("B", k) for k in range(micros - ahead, micros)]


def play(seconds, stages, micros):
    """Seconds of a step; seconds[stage][computation] are those of each."""
    done = {}
    lists = [order(stage, stages, micros) for stage in range(stages)]
    clocks, at = [0.0] * stages, [0] * stages
    while any(at[stage] < len(lists[stage]) for stage in range(stages)):
        for stage in range(stages):
            while at[stage] < len(lists[stage]):
                kind, k = lists[stage][at[stage]]
                other = stage - 1 if kind == "F" else stage + 1
                if 0 <= other < stages and (other, kind, k) not in done:
                    break
                start = max(clocks[stage], done.get((other, kind, k), 0.0))
                clocks[stage] = done[stage, kind, k] = start + seconds[stage][kind, k]
                at[stage] += 1
    return max(clocks)


def computations(spans, blocks, stage, stages, micros):
    """Seconds and times of each forward and backward of a step, from the spans of its blocks."""
    found, left = {}, list(spans)
    for computation in order(stage, stages, micros):
        mine, left = left[:blocks], left[blocks:]
        found[computation] = (sum(span["dur"] for span in mine), mine[0]["ts"], mine[-1]["ts"] + mine[-1]["dur"])
    return found


def main():
    path, stages, micros = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    events = json.load(open(path))["traceEvents"]
    by_rank = defaultdict(list)
    for event in events:
        if event.get("ph") == "X" and event.get("cat") in ("forward", "backward"):
            by_rank[event["pid"]].append(event)
    steps = defaultdict(list)
    for stage in range(stages):
        spans = sorted(by_rank[stage], key=lambda event: event["ts"])
        blocks = len({span["args"]["unit"] for span in spans})
        a_step = 2 * micros * blocks
        for step in range(len(spans) // a_step):
            part = spans[step * a_step : (step + 1) * a_step]
            steps[step].append(computations(part, blocks, stage, stages, micros))
    played, traced = [], []
    for step, of_stages in sorted(steps.items())[1:]:
        if len(of_stages) < stages:
            continue
        seconds = [{key: value[0] for key, value in one.items()} for one in of_stages]
        busy = sum(sum(one.values()) for one in seconds)
        played.append(1 - busy / (stages * play(seconds, stages, micros)))
        everything = [value for one in of_stages for value in one.values()]
        span = max(end for _, _, end in everything) - min(start for _, start, _ in everything)
        traced.append(1 - busy / (stages * span))
    told = f"{len(played)} steps; equal stages would be idle {(stages - 1) / (micros + stages - 1):.1%}"
    print(f"played {statistics.median(played):.1%}, traced {statistics.median(traced):.1%} of {told}")


main()
