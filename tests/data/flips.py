"""Opens an HDF5 file again and again, each time with another byte of its metadata changed, and counts how the program ends.

    tests/data/flips.py PROGRAM FILE inspect|verify TRIALS [SEED]

A damaged file must be read or refused, with exit code 0 or 2: an end by a signal is a failure. If the child process that opens
files first ends by a signal, the error names it, and the signals are counted. Needs h5py; FILE is not changed.
"""

import collections
import os
import random
import re
import subprocess
import sys
import tempfile

import h5py


def metadata(path):
    """Returns the offsets of all bytes that are not elements of datasets."""
    is_element = bytearray(os.path.getsize(path))

    def note(name, object):
        if not isinstance(object, h5py.Dataset):
            return
        if object.chunks:
            chunks = [object.id.get_chunk_info(i) for i in range(object.id.get_num_chunks())]
            ranges = [(chunk.byte_offset, chunk.size) for chunk in chunks]
        else:
            ranges = [(object.id.get_offset(), object.id.get_storage_size())]
        for first, size in ranges:
            if first is not None:
                is_element[first : first + size] = b"\1" * size

    with h5py.File(path, "r") as file:
        file.visititems(note)
    return [place for place, element in enumerate(is_element) if not element]


def main():
    program, path, command, trials = sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])
    choose = random.Random(int(sys.argv[5]) if len(sys.argv) > 5 else 1)
    places = metadata(path)
    with open(path, "rb") as file:
        whole = file.read()
    ends, died = collections.Counter(), []
    with tempfile.TemporaryDirectory() as folder:
        copy = os.path.join(folder, "train-00000.h5")
        for _ in range(trials):
            damaged, place = bytearray(whole), choose.choice(places)
            flipped = 1 << choose.randrange(8) if choose.random() < 0.5 else choose.randrange(1, 256)
            damaged[place] ^= flipped
            with open(copy, "wb") as file:
                file.write(damaged)
            ended = subprocess.run([program, "data", command, copy], capture_output=True, text=True, timeout=120)
            signal = re.search(r"train-00000\.h5 is damaged: .* by signal \d+ \((\w+)\)", ended.stderr)
            ends[f"exit {ended.returncode}" + (f", child by {signal[1]}" if signal else "")] += 1
            if ended.returncode not in (0, 2):
                died.append((place, flipped, ended.returncode, ended.stderr[-200:]))
    print(f"{path}: {command}, {len(places)} bytes of metadata of {len(whole)}: {dict(ends)}")
    for one in died:
        print("  ", one)
    sys.exit(1 if died else 0)


main()
