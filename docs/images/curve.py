#!/usr/bin/env python3
"""Draws the loss curves of runs: docs/images/curve.py OUT.svg LABEL=RUN [LABEL=RUN …]. The first run's curve is a band
under the others, so that equal ones show. Made of runs/… with:

    hpctrain train --set parallel.virtual_ranks=8 --set run.name=one
    mpirun -np 4 hpctrain train --set parallel.virtual_ranks=8 --set parallel.zero=3 --set run.name=four
    mpirun -np 4 hpctrain train --set parallel.virtual_ranks=8 --set parallel.pipeline=2 --set parallel.zero=1 \
        --set batch.micro=2 --set run.name=stages
"""
import json
import sys
from pathlib import Path

WIDTH, HEIGHT = 760, 330
LEFT, RIGHT, TOP, BOTTOM = 58, 18, 18, 44
COLOURS = ["#8fb8e8", "#c2410c", "#15803d"]


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def main():
    out, runs = sys.argv[1], [argument.split("=", 1) for argument in sys.argv[2:]]
    curves = {label: [(row["step"], row["loss"]) for row in lines(Path(run) / "metrics.jsonl")] for label, run in runs}
    validation = [(row["step"], row["loss"]) for row in lines(Path(runs[0][1]) / "eval.jsonl")]
    steps = max(step for curve in curves.values() for step, _ in curve)
    low, high = 1.5, 4.5
    x = lambda step: LEFT + (WIDTH - LEFT - RIGHT) * step / steps
    y = lambda loss: TOP + (HEIGHT - TOP - BOTTOM) * (high - loss) / (high - low)
    svg = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="13">',
        "<style>text{fill:#1d2731}.g{stroke:#9ca3af;stroke-opacity:.35}</style>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
    ]
    for loss in range(2, 5):
        svg.append(f'<line class="g" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(loss):.1f}" y2="{y(loss):.1f}"/>')
        svg.append(f'<text x="{LEFT - 8}" y="{y(loss) + 4:.1f}" text-anchor="end">{loss}</text>')
    for step in range(0, steps + 1, 500):
        svg.append(f'<text x="{x(step):.1f}" y="{HEIGHT - BOTTOM + 20}" text-anchor="middle">{step}</text>')
    svg.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 6}" text-anchor="middle">step</text>')
    middle = (TOP + HEIGHT - BOTTOM) / 2
    svg.append(f'<text x="16" y="{middle}" text-anchor="middle" transform="rotate(-90 16 {middle})">loss</text>')
    for i, (label, curve) in enumerate(curves.items()):
        points = " ".join(f"{x(step):.1f},{y(loss):.1f}" for step, loss in curve)
        # A band, a line on it, and dashes on that line.
        wide = ['stroke-width="6"', 'stroke-width="1.2"', 'stroke-width="1.2" stroke-dasharray="7 7"'][i]
        svg.append(f'<polyline fill="none" stroke="{COLOURS[i]}" {wide} stroke-linejoin="round" points="{points}"/>')
        place = TOP + 12 + 22 * i
        svg.append(f'<line x1="430" x2="460" y1="{place}" y2="{place}" stroke="{COLOURS[i]}" {wide}/>')
        svg.append(f'<text x="470" y="{place + 4}">{label}</text>')
    for step, loss in validation:
        svg.append(f'<circle cx="{x(step):.1f}" cy="{y(loss):.1f}" r="4.5" fill="none" stroke="#7c3aed" stroke-width="1.6"/>')
    place = TOP + 12 + 22 * len(curves)
    svg.append(f'<circle cx="445" cy="{place}" r="4.5" fill="none" stroke="#7c3aed" stroke-width="1.6"/>')
    svg.append(f'<text x="470" y="{place + 4}">validation: {validation[-1][1]:.4f} at the end</text>')
    equal = len({tuple(curve) for curve in curves.values()}) == 1
    print("equal in every bit" if equal else "NOT equal")
    Path(out).write_text("\n".join(svg) + "\n</svg>\n")


main()
