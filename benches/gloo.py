#!/usr/bin/env python3
"""All-reduces of two ranks of `hpctrain --spawn`, and a worker's exchange with a parameter server, beside PyTorch's gloo.

    benches/gloo.py [--program target/release/hpctrain] [--rounds 5] [--python python3]

Both send over TCP on 127.0.0.1, two processes of one thread. For each size the two take turns; prints medians in GB/s of the
buffer's bytes, their ratio, and its range over the rounds. Here each size takes the faster of the tree and the ring, as
`comm.algorithm=auto` does. The exchange of a server is a worker's pull of all parameters and its push of a gradient of them, with
the server's update by AdamW; beside it stands an all-reduce of as many bytes, followed by PyTorch's fused AdamW. `--python` needs
PyTorch.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

SIZES = [64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20]

# Bytes of a measurement.
TOTAL = 1 << 30


def gloo_rank(rank, port, size, updates):
    """Seconds of an all-reduce, and of an update if one follows, on one of two processes: the median of batches."""
    import time

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    parameter = torch.nn.Parameter(torch.zeros(size // 4))
    parameter.grad = buffer = torch.zeros(size // 4)
    optimizer = torch.optim.AdamW([parameter], fused=True)
    count = max(2, min(300, TOTAL // 7 // size))
    times = []
    for batch in range(8):
        dist.barrier()
        begun = time.perf_counter()
        for _ in range(count):
            dist.all_reduce(buffer)
            if updates:
                optimizer.step()
        # The first batch touches memory for the first time.
        if batch:
            times.append((time.perf_counter() - begun) / count)
    dist.barrier()
    if rank == 0:
        print(statistics.median(times), flush=True)
    # gloo's threads do not always end in good order.
    os._exit(0)


def gloo(python, size, updates=False):
    """Bytes a second of PyTorch's all-reduce, and an update if one follows."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [python, __file__, "--gloo-rank"]
    ranks = [subprocess.Popen([*command, str(rank), str(port), str(size), str(int(updates))], stdout=subprocess.PIPE, text=True) for rank in range(2)]
    told = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise SystemExit("PyTorch's processes failed")
    return size / float(told[0])


def all_reduce(program, size):
    """Bytes a second of the faster algorithm here."""
    command = [program, "bench", "comm", "--spawn", "2", "--operations", "all_reduce", "--algorithms", "halving-doubling,ring"]
    run = subprocess.run([*command, "--sizes", str(size), "--json"], stdout=subprocess.PIPE, check=True)
    return max(row["bytes"] / row["microseconds"] * 1e6 for row in json.loads(run.stdout)["rows"])


def exchange(program):
    """The bytes of all parameters of a run with one worker and one server, and those a second of a pull and a push."""
    with tempfile.TemporaryDirectory() as root:
        run = pathlib.Path(root) / "x"
        settings = {"model.width": 256, "batch.global": 4, "batch.worker": 4, "run.steps": 60, "run.threads": 1, "run.root": root,
                    "run.name": "x", "eval.every": 0, "eval.samples": 16, "checkpoint.every": 0, "parameter_server.staleness": '"none"'}
        command = [program, "ps", "coordinator", "--servers", "1", "--workers", "1", "--preset", "gpt-char"]
        command += [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        roles = [subprocess.Popen(command, **quiet)]
        roles += [subprocess.Popen([program, "ps", role, "--run", str(run)], **quiet) for role in ("server", "worker")]
        if any([role.wait() for role in roles]):
            raise SystemExit(f"{' '.join(command)} failed")
        lines = [json.loads(line) for line in (run / "workers.jsonl").read_text().splitlines()]
        card = json.loads((run / "run.json").read_text())
    parameters = card["parameters"]
    # The first steps touch memory for the first time.
    return 4 * parameters, 4 * parameters / statistics.median(line["pull_ms"] + line["push_ms"] for line in lines[5:]) * 1e3


def row(what, size, pairs):
    theirs, mine = (statistics.median(rates) / 1e9 for rates in zip(*pairs))
    ratios = [mine / theirs for theirs, mine in pairs]
    print(f"| {what} | {size:,} | {theirs:.2f} | {mine:.2f} | {mine / theirs:.2f} ({min(ratios):.2f} to {max(ratios):.2f}) |", flush=True)


def main():
    if "--gloo-rank" in sys.argv:
        return gloo_rank(*map(int, sys.argv[2:6]))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", default="target/release/hpctrain")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--python", default="python3")
    arguments = parser.parse_args()
    print("| exchange | bytes | gloo, GB/s | here, GB/s | ratio (range) |\n|---|---|---|---|---|")
    for size in SIZES:
        pairs = [(gloo(arguments.python, size), all_reduce(arguments.program, size)) for _ in range(arguments.rounds)]
        row("all-reduce", size, pairs)
    pairs = []
    for _ in range(arguments.rounds):
        size, rate = exchange(arguments.program)
        pairs.append((gloo(arguments.python, size, updates=True), rate))
    row("push, update, pull", size, pairs)


if __name__ == "__main__":
    main()
