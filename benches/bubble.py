#!/usr/bin/env python3
"""The idle part of a pipeline's steps, from a trace: benches/bubble.py TRACE STAGES MICRO_BATCHES.

Of all steps but the first: *played* has the median forward and backward of every stage in the order of one forward, one
backward, with messages that take no time; *traced* is the median of the time in which the ranks of the trace computed
nothing, between the first forward and the last backward of a step. Made with:

    mpirun -np 2 --bind-to none hpctrain train --set parallel.pipeline=2 --set run.threads=1 --set model.width=256 \\
        --set batch.micro=4 --set batch.global=32 --set run.steps=30 --trace trace.json
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
    whole = [of_stages for step, of_stages in sorted(steps.items())[1:] if len(of_stages) == stages]
    # Of each stage the median forward and backward: two of one kind take as long.
    seconds = []
    for stage in range(stages):
        of_kind = lambda kind: [one[stage][key][0] for one in whole for key in one[stage] if key[0] == kind]
        typical = {kind: statistics.median(of_kind(kind)) for kind in "FB"}
        seconds.append({key: typical[key[0]] for key in whole[0][stage]})
    busy = [sum(one.values()) for one in seconds]
    played = 1 - sum(busy) / (stages * play(seconds, stages, micros))
    traced = []
    for of_stages in whole:
        busy_here = sum(value[0] for one in of_stages for value in one.values())
        everything = [value for one in of_stages for value in one.values()]
        span = max(end for _, _, end in everything) - min(start for _, start, _ in everything)
        traced.append(1 - busy_here / (stages * span))
    shares = ", ".join(f"{one / sum(busy):.1%}" for one in busy)
    equal = (stages - 1) / (micros + stages - 1)
    print(f"{len(whole)} steps; work of the stages: {shares}; idle: {equal:.1%} if they were equal, ", end="")
    print(f"{played:.1%} played, {statistics.median(traced):.1%} traced")


main()
