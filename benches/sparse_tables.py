#!/usr/bin/env python3
"""Step times of the preset dlrm by the rows of its tables, with dense and with sparse updates.

    benches/sparse_tables.py [--program target/release/hpctrain] [--pairs 5] [--ranks 2] [--steps 150] [--rows 10000,1000000]
        [--servers 1] [--set parallel.tables=row-wise]

Imports a made-up table of clicks with 26 categories, whose ids are hashed to each number of rows divided by 26, and trains on it; the
runs take turns. With `--servers`, that many parameter servers hold the parameters, and `--ranks` are workers. Prints for each number
of rows and `optimizer.tables` the median step, and the median of the ratios to the fewest rows. The first 30 steps do not count.
"""

import argparse
import json
import pathlib
import random
import statistics
import subprocess
import tempfile

WARM_UP = 30
CATEGORIES = 26
NUMBERS = 13
SAMPLES = 20_000


def write_table(path):
    """A table of clicks with random numbers and uniform categories."""
    chance = random.Random(1)
    names = ["clicked", *(f"I{i}" for i in range(1, NUMBERS + 1)), *(f"C{i}" for i in range(1, CATEGORIES + 1))]
    with path.open("w") as table:
        table.write(",".join(names) + "\n")
        for _ in range(SAMPLES):
            row = [chance.randrange(2), *(f"{chance.random():.3f}" for _ in range(NUMBERS)),
                   *(f"c{chance.randrange(1 << 40):x}" for _ in range(CATEGORIES))]
            table.write(",".join(map(str, row)) + "\n")


def import_table(arguments, table, rows, out):
    """Imports the table with this number of rows in all tables of the network."""
    categories = ",".join(f"C{i}" for i in range(1, CATEGORIES + 1))
    command = [arguments.program, "data", "import", "csv", table, "--target", "clicked", "--categorical", categories,
               "--hash", str(rows // CATEGORIES), "--out", out]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def layers(rows):
    """The layers of the preset dlrm with this number of rows in all tables."""
    dense = "{kind='dense',units=512},{kind='relu'},{kind='dense',units=256},{kind='relu'}"
    ids = ",".join([str(rows // CATEGORIES)] * CATEGORIES)
    bottom = f"{dense},{{kind='dense',units=64}},{{kind='relu'}},{{kind='dense',units=16}},{{kind='relu'}}"
    return (f"model.layers=[{{kind='embedding_tables',width=16,ids=[{ids}],dense=[{bottom}]}},{{kind='dot_interaction'}},"
            f"{dense},{{kind='dense',units=1}}]")


def train(arguments, data, rows, updates):
    """The median time of the steps in milliseconds."""
    with tempfile.TemporaryDirectory() as root:
        settings = [
            f"run.steps={arguments.steps}", f"run.root={root}", "run.name=x", "eval.every=0", "eval.samples=16",
            "checkpoint.every=100000", f"data.path={data}", layers(rows), f"optimizer.tables={updates}", *arguments.set,
        ]
        processes = arguments.ranks + arguments.servers
        command = ["mpirun", "-np", str(processes), arguments.program, "train", "--preset", "dlrm"]
        command += ["--servers", str(arguments.servers)] if arguments.servers else []
        command += [word for setting in settings for word in ("--set", setting)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        lines = (pathlib.Path(root) / "x" / "metrics.jsonl").read_text().splitlines()
    return statistics.median(json.loads(line)["step_ms"] for line in lines[WARM_UP:])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", default="target/release/hpctrain")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--servers", type=int, default=0)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--rows", type=lambda rows: [int(one) for one in rows.split(",")], default=[10_000, 1_000_000])
    parser.add_argument("--updates", type=lambda updates: updates.split(","), default=["dense", "sparse"])
    parser.add_argument("--set", action="append", default=[], help="another setting of all runs")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        table = pathlib.Path(work) / "clicks.csv"
        write_table(table)
        for rows in arguments.rows:
            import_table(arguments, table, rows, f"{work}/{rows}")
        found = {}
        for _ in range(arguments.pairs):
            for updates in arguments.updates:
                for rows in arguments.rows:
                    found.setdefault((updates, rows), []).append(train(arguments, f"{work}/{rows}", rows, updates))
    for (updates, rows), times in found.items():
        ratios = [time / least for time, least in zip(times, found[updates, arguments.rows[0]])]
        print(f"{updates}, {rows:,} rows: step {statistics.median(times):.2f} ms, {statistics.median(ratios):.2f} × "
              f"{arguments.rows[0]:,} rows ({min(ratios):.2f} to {max(ratios):.2f})")


if __name__ == "__main__":
    main()
