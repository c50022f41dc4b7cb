#!/usr/bin/env python3
"""How fast samples arrive: hpctrain's loader, plain reads, and h5py with PyTorch's DataLoader.

    python benches/loader.py --dir /tmp --rounds 5

The same kinds of files, written anew, in the page cache: 60,000 random images of 28 x 28 bytes with classes, shuffled, in batches
of 128, and windows of 256 + 1 tokens of 16 bits, shuffled. The peer reads a sample for each index, as its tutorials do, with no,
one and two workers, and once a sorted batch at a time; the fastest counts. Needs torch, h5py and numpy, and the release build.
"""

import argparse
import json
import os
import statistics
import subprocess
import tempfile
import time

import h5py
import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler

SAMPLES, BATCH, CONTEXT = 60_000, 128, 256


class Images(Dataset):
    """An image and its class for an index, or all of a list of indices at once."""

    def __init__(self, path):
        self.path, self.file = path, None

    def __len__(self):
        return SAMPLES

    def open(self):
        # A worker of its own opens a file of its own.
        if self.file is None:
            self.file = h5py.File(self.path, "r")
            self.inputs, self.targets = self.file["inputs"], self.file["targets"]

    def __getitem__(self, index):
        self.open()
        if isinstance(index, list):
            index = np.sort(index)
            inputs, targets = self.inputs[index], torch.from_numpy(self.targets[index].astype(np.int64))
        else:
            inputs, targets = self.inputs[index], int(self.targets[index])
        # The scale, as hpctrain's loader applies it.
        return (torch.from_numpy(inputs).float() - 127.5) / 73.9, targets


class Windows(Dataset):
    """A window of ids, and the ids that follow them."""

    def __init__(self, path):
        self.path, self.file = path, None

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        if self.file is None:
            self.file = h5py.File(self.path, "r")
            self.tokens = self.file["tokens"]
        window = torch.from_numpy(self.tokens[index * CONTEXT : (index + 1) * CONTEXT + 1].astype(np.int64))
        return window[:-1], window[1:]


def write(folder):
    """The three files that are read, by what is in them."""
    random = np.random.default_rng(1)
    paths = {name: os.path.join(folder, name + ".h5") for name in ("images", "packed", "tokens")}
    pixels = random.integers(0, 256, (SAMPLES, 28, 28, 1), dtype=np.uint8)
    classes = random.integers(0, 10, SAMPLES, dtype=np.uint32)
    with h5py.File(paths["images"], "w") as file:
        file["inputs"], file["targets"] = pixels, classes
    with h5py.File(paths["packed"], "w") as file:
        sparse = np.where(pixels < 51, 200, 0).astype(np.uint8)
        file.create_dataset("inputs", data=sparse, chunks=(64, 28, 28, 1), compression="gzip", compression_opts=4)
        file["targets"] = classes
    with h5py.File(paths["tokens"], "w") as file:
        file["tokens"] = random.integers(0, 1 << 16, SAMPLES * CONTEXT + 1, dtype=np.uint16)
    return paths


def rate(loader, seconds):
    """Samples a second, without the first batches, which start workers."""
    samples, start = 0, None
    for number, (inputs, _) in enumerate(loader):
        if number == 3:
            start = time.perf_counter()
        elif start is not None:
            samples += len(inputs)
            if time.perf_counter() - start > seconds:
                break
    return samples / (time.perf_counter() - start)


def peers(dataset, with_lists):
    """Ways to read a data set, by name."""
    ways = {
        f"{workers} workers": DataLoader(dataset, BATCH, shuffle=True, num_workers=workers) for workers in (0, 1, 2)
    }
    if with_lists:
        batches = BatchSampler(RandomSampler(range(SAMPLES)), BATCH, False)
        ways["sorted batches"] = DataLoader(dataset, batch_size=None, sampler=batches)
    return ways


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", default=".", help="directory on the disk to be used")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="time of each way of the peer in a round")
    parser.add_argument("--hpctrain", default="target/release/hpctrain")
    args = parser.parse_args()
    torch.set_num_threads(1)
    names = {
        "images": "images, shuffled",
        "packed": "images, deflated chunks, shuffled",
        "tokens": "token windows, shuffled",
    }
    ours = {name: [] for name in names}
    plain = {name: [] for name in names}
    theirs = {name: {} for name in names}
    with tempfile.TemporaryDirectory(dir=args.dir) as folder:
        paths = write(folder)
        for _ in range(args.rounds):
            command = [args.hpctrain, "bench", "data", "--json", "--rounds", "1", "--dir", folder]
            report = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            rows = {row["what"]: row for row in report["rows"]}
            for name, what in names.items():
                ours[name].append(rows[what]["samples_per_second"])
                plain[name].append(rows[what]["plain_samples_per_second"])
                dataset = (Windows if name == "tokens" else Images)(paths[name])
                for way, loader in peers(dataset, name != "tokens").items():
                    theirs[name].setdefault(way, []).append(rate(loader, args.seconds))
    print(f"samples a second, medians of {args.rounds} rounds")
    print(f"{'':36}{'hpctrain':>12}{'plain reads':>13}{'peer':>10}  {'peer reads with':<16}{'hpctrain / peer':>15}")
    for name, what in names.items():
        own = statistics.median(ours[name])
        limit = "–" if None in plain[name] else f"{statistics.median(plain[name]):,.0f}"
        way, rates = max(theirs[name].items(), key=lambda item: statistics.median(item[1]))
        peer = statistics.median(rates)
        ratios = [a / b for a, b in zip(ours[name], rates)]
        print(f"{what:36}{own:12,.0f}{limit:>13}{peer:10,.0f}  {way:<16}{statistics.median(ratios):15.1f}")


if __name__ == "__main__":
    main()
