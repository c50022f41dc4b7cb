#!/usr/bin/env python3
"""Saving and restoring a state of some 500 MB beside plain files, torch.save, safetensors and PyTorch's distributed checkpoint.

    python benches/checkpoints.py --dir /tmp --rounds 5

Everything is written to the same directory, one after the other in every round, each followed by fsync of the files and
the directory; the table has medians over the rounds. Needs torch, safetensors and numpy, mpirun, and the release build.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import time

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from safetensors.torch import load_file, save_file

RANKS = 2


def sync(path):
    """Makes a file, or all files of a directory, and the directory durable."""
    paths = [path, os.path.dirname(path)]
    if os.path.isdir(path):
        paths += [os.path.join(root, name) for root, _, names in os.walk(path) for name in names]
    for one in paths:
        fd = os.open(one, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)


def state(size, seed=0):
    """Tensors as a network of width 512 has them, three times: parameters and the optimizer's moments."""
    torch.manual_seed(seed)
    layer = {"qkv": (512, 1536), "proj": (512, 512), "fc": (512, 2048), "out": (2048, 512)}
    count = max(1, size // (12 * 12 * 512 * 512))
    return {
        f"{part}.{index}.{name}": torch.randn(shape)
        for part in ("params", "m", "v")
        for index in range(count)
        for name, shape in layer.items()
    }


def timed(work):
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def distributed(rank, folder, size, port, results):
    """One rank of PyTorch's distributed checkpoint: each rank saves its half of the tensors."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    torch.set_num_threads(1)
    mine = {name: x for i, (name, x) in enumerate(state(size).items()) if i % RANKS == rank}
    path = os.path.join(folder, "dcp2")

    def save():
        dcp.save(mine, checkpoint_id=path)
        dist.barrier()
        if rank == 0:
            sync(path)
        dist.barrier()

    dist.barrier()
    saved = timed(save)
    dist.barrier()
    loaded = timed(lambda: (dcp.load(mine, checkpoint_id=path), dist.barrier()))
    if rank == 0:
        results.put((saved, loaded))
    dist.destroy_process_group()


def of_peers(folder, tensors, size, port):
    """Seconds of one round: name to (save, load)."""
    path = os.path.join(folder, "peer")
    room = {name: torch.empty_like(x) for name, x in tensors.items()}
    ways = {
        "torch.save": (lambda: torch.save(tensors, path), lambda: torch.load(path, weights_only=True)),
        "safetensors": (lambda: save_file(tensors, path), lambda: [room[n].copy_(x) for n, x in load_file(path).items()]),
        "distributed checkpoint, 1 rank": (
            lambda: dcp.save(tensors, checkpoint_id=path),
            lambda: dcp.load(room, checkpoint_id=path),
        ),
    }
    found = {}
    for name, (save, load) in ways.items():
        os.sync()
        saved = timed(lambda save=save: (save(), sync(path)))
        found[name] = (saved, timed(load))
        shutil.rmtree(path) if os.path.isdir(path) else os.remove(path)
    os.sync()
    results = mp.get_context("spawn").SimpleQueue()
    mp.spawn(distributed, args=(folder, size, port, results), nprocs=RANKS)
    found[f"distributed checkpoint, {RANKS} ranks"] = results.get()
    shutil.rmtree(os.path.join(folder, "dcp2"))
    return found


def of_ours(program, folder, size):
    command = ["mpirun", "-np", str(RANKS), program, "bench", "checkpoint", "--json", "--rounds", "1"]
    env = dict(os.environ, OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
    os.sync()
    out = subprocess.run([*command, "--dir", folder, "--size", str(size)], env=env, check=True, capture_output=True)
    return json.loads(out.stdout)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", default="./target/release/hpctrain")
    parser.add_argument("--dir", default=".")
    parser.add_argument("--size", type=int, default=500_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    folder = os.path.join(os.path.abspath(args.dir), "checkpoints-bench.tmp")
    shutil.rmtree(folder, ignore_errors=True)
    os.makedirs(folder)

    tensors = state(args.size)
    count = sum(x.numel() * 4 for x in tensors.values())
    save, load, ratios = {}, {}, {"raw_write/save": [], "copy/raw_copy": [], "raw_read/restore": []}
    for number in range(args.rounds):
        for name, (saved, loaded) in of_peers(folder, tensors, args.size, 29600 + number).items():
            save.setdefault(name, []).append(count / saved / 1e6)
            load.setdefault(name, []).append(count / loaded / 1e6)
        ours = of_ours(args.program, folder, args.size)
        for name, written, read in (("plain files", "raw_write", "raw_read"), ("hpctrain", "save", "restore")):
            save.setdefault(name, []).append(ours["bytes"] / ours[written] / 1e6)
            load.setdefault(name, []).append(ours["bytes"] / ours[read] / 1e6)
        for ratio, values in ratios.items():
            above, below = ratio.split("/")
            values.append(ours[above] / ours[below])
    shutil.rmtree(folder)

    print(f"{count / 1e6:.0f} MB, median of {args.rounds} rounds (least to most), MB/s")
    print(f"{'':34} {'write and fsync':>24} {'read':>24}")
    told = lambda values: f"{statistics.median(values):7.0f} ({min(values):.0f}-{max(values):.0f})"
    for name in sorted(save, key=lambda name: -statistics.median(save[name])):
        print(f"{name:34} {told(save[name]):>24} {told(load[name]):>24}")
    peers = [name for name in save if name not in ("hpctrain", "plain files")]
    for what, rates in (("write", save), ("read", load)):
        best = max(peers, key=lambda name: statistics.median(rates[name]))
        ratio = statistics.median(a / b for a, b in zip(rates["hpctrain"], rates[best]))
        print(f"hpctrain {what}: {ratio:.2f} of {best}")
    for ratio, values in ratios.items():
        print(f"{ratio}: {statistics.median(values):.2f}")


if __name__ == "__main__":
    main()
