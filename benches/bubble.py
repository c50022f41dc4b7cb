#!/usr/bin/env python3
"""The idle part of a pipeline's steps, from a trace: benches/bubble.py TRACE STAGES MICRO_BATCHES [zero-bubble].

Of all steps but the first: *played* has the median computations of every stage in the order of the schedule, one forward, one
backward or zero-bubble, with messages that take no time; *with equal stages* is the same with every stage's computations scaled to the
same sum; *traced* is the median of the time in which the ranks of the trace computed nothing, between the first forward and the
last computation of a step. Made with:

    mpirun -np 2 --bind-to none hpctrain train --set parallel.pipeline=2 --set run.threads=1 --set model.width=256 \\
        --set batch.micro=4 --set batch.global=32 --set run.steps=30 --trace trace.json
"""
import json
import statistics
import sys
from collections import defaultdict


def order(stage, stages, micros, puts_off):
    """The computations of a stage with a micro-batch: 'F', 'B' (Narayanan et al., 2019); 'W', if weights' gradients are put off
    (Qi et al., 2023)."""
    ahead = min(stages - 1 - stage, micros)
    computations = [("F", k) for k in range(ahead)]
    for k in range(micros - ahead):
        computations += [("F", ahead + k), ("B", k)]
    computations += [("B", k) for k in range(micros - ahead, micros)]
    if not puts_off or stage == 0:
        return computations
    split, waiting = [], []
    for kind, k in computations:
        split.append((kind, k))
        if kind == "B":
            waiting.append(k)
            while len(waiting) > (stage if k + 1 < micros else 0):
                split.append(("W", waiting.pop(0)))
    return split


def play(seconds, stages, micros, puts_off):
    """Seconds of a step; seconds[stage][computation] are those of each."""
    done = {}
    lists = [order(stage, stages, micros, puts_off) for stage in range(stages)]
    clocks, at = [0.0] * stages, [0] * stages
    while any(at[stage] < len(lists[stage]) for stage in range(stages)):
        for stage in range(stages):
            while at[stage] < len(lists[stage]):
                kind, k = lists[stage][at[stage]]
                other = {"F": stage - 1, "B": stage + 1, "W": stages}[kind]
                if 0 <= other < stages and (other, kind, k) not in done:
                    break
                start = max(clocks[stage], done.get((other, kind, k), 0.0))
                clocks[stage] = done[stage, kind, k] = start + seconds[stage][kind, k]
                at[stage] += 1
    return max(clocks)


def computations(spans, blocks, stage, stages, micros, puts_off):
    """Seconds and times of each computation of a step, from the spans of its blocks."""
    found, left = {}, list(spans)
    for computation in order(stage, stages, micros, puts_off):
        mine, left = left[:blocks], left[blocks:]
        found[computation] = (sum(span["dur"] for span in mine), mine[0]["ts"], mine[-1]["ts"] + mine[-1]["dur"])
    return found


def main():
    path, stages, micros = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    puts_off = sys.argv[4:] == ["zero-bubble"]
    events = json.load(open(path))["traceEvents"]
    by_rank = defaultdict(list)
    for event in events:
        if event.get("ph") == "X" and event.get("cat") in ("forward", "backward", "gradients of weights"):
            by_rank[event["pid"]].append(event)
    steps = defaultdict(list)
    for stage in range(stages):
        spans = sorted(by_rank[stage], key=lambda event: event["ts"])
        blocks = len({span["args"]["unit"] for span in spans})
        a_step = len(order(stage, stages, micros, puts_off)) * blocks
        for step in range(len(spans) // a_step):
            part = spans[step * a_step : (step + 1) * a_step]
            steps[step].append(computations(part, blocks, stage, stages, micros, puts_off))
    whole = [of_stages for step, of_stages in sorted(steps.items())[1:] if len(of_stages) == stages]
    # Of each stage the median of each kind: two of one kind take as long.
    seconds = []
    for stage in range(stages):
        of_kind = lambda kind: [one[stage][key][0] for one in whole for key in one[stage] if key[0] == kind]
        typical = {kind: statistics.median(of_kind(kind)) for kind in {key[0] for key in whole[0][stage]}}
        seconds.append({key: typical[key[0]] for key in whole[0][stage]})
    busy = [sum(one.values()) for one in seconds]
    played = 1 - sum(busy) / (stages * play(seconds, stages, micros, puts_off))
    mean = sum(busy) / stages
    scaled = [{key: one[key] * mean / busy[stage] for key in one} for stage, one in enumerate(seconds)]
    evenly = 1 - mean / play(scaled, stages, micros, puts_off)
    traced = []
    for of_stages in whole:
        busy_here = sum(value[0] for one in of_stages for value in one.values())
        everything = [value for one in of_stages for value in one.values()]
        span = max(end for _, _, end in everything) - min(start for _, start, _ in everything)
        traced.append(1 - busy_here / (stages * span))
    shares = ", ".join(f"{one / sum(busy):.1%}" for one in busy)
    equal = (stages - 1) / ((3 if puts_off else 1) * micros + stages - 1)
    print(f"{len(whole)} steps; work of the stages: {shares}; idle: {equal:.1%} if they were equal, ", end="")
    print(f"{played:.1%} played, {evenly:.1%} with equal stages, {statistics.median(traced):.1%} traced")


main()
