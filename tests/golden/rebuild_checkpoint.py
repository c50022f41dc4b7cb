"""Rebuilds every tensor of a checkpoint and checks every byte: python rebuild_checkpoint.py CHECKPOINT"""

import json, pathlib, sys, zlib
import h5py, numpy as np

folder, block = pathlib.Path(sys.argv[1]), 2**20
text = (folder / "manifest.json").read_bytes()
assert (folder / "manifest.crc32").read_text() == f"{zlib.crc32(text):08x}  manifest.json\n"
manifest = json.loads(text)
assert manifest["version"] == 3
groups = ["params"] + manifest["state"]
used = {name: [] for name in manifest["files"]}
for tensor, entry in manifest["tensors"].items():
    arrays = {group: np.zeros(entry["shape"], "<f4") for group in groups}
    found, files = np.zeros(entry["shape"], int), []
    for piece in entry["pieces"]:
        number = files.count(piece["file"])
        files.append(piece["file"])
        columns = np.s_[:, slice(*piece["columns"])] if "columns" in piece else ...
        place = slice(piece["start"], piece["start"] + piece["len"])
        found[columns].flat[place] += 1
        for group, part in zip(groups, piece["parts"], strict=True):
            with h5py.File(folder / piece["file"]) as file:
                dataset = file[group][f"{tensor}@{number}" if number else tensor]
                assert (dataset.attrs["start"], dataset.id.get_offset()) == (piece["start"], part["offset"])
                assert list(dataset.attrs.get("columns", [])) == piece.get("columns", [])
                values = dataset[:].astype("<f4")
            sums = [zlib.crc32(values[at:at + block].tobytes()) for at in range(0, piece["len"], block)]
            assert len(values) == piece["len"] and sums == part["crc32"], f"/{group}/{tensor} is damaged"
            used[piece["file"]].append((part["offset"], part["offset"] + values.nbytes))
            arrays[group][columns].flat[place] = values
    assert (found == 1).all(), f"{tensor}: a hole or an overlap"
    for group, array in arrays.items():
        print(f"/{group}/{tensor} {zlib.crc32(array.tobytes()):08x}")
for name, entry in manifest["files"].items():
    content, rest, at = (folder / name).read_bytes(), 0, 0
    assert len(content) == entry["bytes"], f"{name} is cut short"
    for start, end in sorted(used[name]) + [(len(content), len(content))]:
        rest, at = zlib.crc32(content[at:start], rest), end
    assert rest == entry["rest_crc32"], f"{name} is damaged"
