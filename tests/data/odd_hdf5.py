"""HDF5 files as other programs write them, each with the expected result.

    python3 tests/data/odd_hdf5.py DIRECTORY

writes the files with h5py and prints a JSON list of cases, for tests/data/odd_hdf5.rs:
  name      the case; its file is DIRECTORY/name.h5
  classes   number of classes of the network, or values = number of values that it predicts
  input     shape of a row in the network
  features, targets   the expected rows, one after the other; or
  refused   words that the error must have; with features as well, either is right
  damaged   whether the error must call the file damaged; otherwise it must not
  set       other keys of [data]
"""

import json
import os
import subprocess
import sys

import h5py
import numpy as np

CASES = []
X = (np.arange(24, dtype=np.float32) / 8).reshape(6, 4)
Y = np.array([0, 1, 2, 0, 1, 2])


def path(name):
    return os.path.join(sys.argv[1], name)


def right(name, features=X, targets=Y, classes=3, values=None, input=(4,), refused=None, **set):
    case = {"name": name, "input": list(input), "set": set}
    case["features"] = np.asarray(features, np.float32).ravel().tolist()
    case["targets"] = np.asarray(targets, np.float32).ravel().tolist()
    case.update({"values": values} if values else {"classes": classes})
    CASES.append(case if refused is None else {**case, "refused": list(refused)})


def refused(name, *words, classes=3, values=None, input=(4,), damaged=False, **set):
    case = {"name": name, "refused": list(words), "input": list(input), "damaged": damaged, "set": set}
    case.update({"values": values} if values else {"classes": classes})
    CASES.append(case)


def create(name, x=X, y=Y, x_options=None, y_options=None, **options):
    """A file with /inputs and /targets; closed."""
    with h5py.File(path(name + ".h5"), "w", **options) as f:
        if x is not None:
            f.create_dataset("inputs", data=x, **(x_options or {}))
        if y is not None:
            f.create_dataset("targets", data=y, **(y_options or {}))


def patch(name, old, new):
    """Overwrites bytes, which must exist."""
    with open(path(name + ".h5"), "rb") as f:
        content = f.read()
    assert len(old) == len(new) and content.count(old) >= 1, name
    with open(path(name + ".h5"), "wb") as f:
        f.write(content.replace(old, new))


def low_level(name, dtype, values, memory):
    """A file whose inputs are of an HDF5 type that numpy does not have: the library converts."""
    create(name, x=None)
    with h5py.File(path(name + ".h5"), "a") as f:
        space = h5py.h5s.create_simple(values.shape)
        data = h5py.h5d.create(f.id, b"inputs", dtype, space)
        data.write(h5py.h5s.ALL, h5py.h5s.ALL, values, mtype=memory)


def types():
    create("f32")
    right("f32")
    for dtype in ["<f8", ">f4", ">f8", "<i8", ">i4", "<u2", ">u2", ">i8", "<u8", "u1", "i1"]:
        name = "type_" + dtype.replace("<", "little_").replace(">", "big_")
        x = X if "f" in dtype else X * 8
        create(name, x.astype(dtype), Y.astype(dtype.replace("f", "i")))
        right(name, x)
    # The smallest subnormal, the largest subnormal, the smallest normal and the largest number among others.
    half = X.astype(np.float16)
    half[0] = [2**-24, 2**-14 - 2**-24, 2**-14, 65504]
    half[1] = [-0.0, 1 / 3, -2.5, 1e-5]
    for name, order in [("f16", "<"), ("f16_big", ">")]:
        create(name, half.astype(order + "f2"))
        right(name, half)
    create("f16_gzip", half, x_options=dict(chunks=(2, 4), compression="gzip", shuffle=True))
    right("f16_gzip", half)
    create("f16_targets", y=half)
    right("f16_targets", targets=half, values=4)
    not_finite = half.copy()
    not_finite[3, 1] = np.inf
    create("f16_infinite", not_finite)
    refused("f16_infinite", "/inputs[3, 1]", "inf", "finite")
    low = h5py.h5t.IEEE_F32LE.copy()
    low.set_fields(15, 7, 8, 0, 7)
    low.set_size(2)
    low.set_ebias(127)
    low_level("bf16", low, X, h5py.h5t.IEEE_F32LE)
    right("bf16")
    create("long_double", X.astype(np.longdouble))
    right("long_double")
    low = h5py.h5t.STD_I32LE.copy()
    low.set_precision(24)
    low.set_size(3)
    low_level("int24", low, (X * 8).astype(np.int32) - 9, h5py.h5t.STD_I32LE)
    right("int24", X * 8 - 9)
    create("bool", X > 1)
    right("bool", X > 1)
    create("bool_targets", y=Y > 0)
    right("bool_targets", targets=Y > 0, classes=2)
    kinds = h5py.enum_dtype({"cat": 0, "dog": 1, "eel": 2}, basetype="u1")
    with h5py.File(path("enum_targets.h5"), "w") as f:
        f["inputs"] = X
        f.create_dataset("targets", data=Y.astype("u1"), dtype=kinds)
    right("enum_targets")
    with h5py.File(path("named_type.h5"), "w") as f:
        f["type"] = np.dtype("<f4")
        f.create_dataset("inputs", data=X, dtype=f["type"])
        f["targets"] = Y
    right("named_type")
    create("fixed_strings", X.astype("S4"))
    refused("fixed_strings", "/inputs", "string", "numbers")
    with h5py.File(path("strings_as_classes.h5"), "w") as f:
        f["inputs"] = X
        f.create_dataset("targets", data=["cat", "dog", "eel"] * 2, dtype=h5py.string_dtype())
    refused("strings_as_classes", "/targets", "string", "integers", "number the classes")
    create("compound", np.zeros(6, [("a", "f4"), ("b", "i8")]))
    refused("compound", "/inputs", "compound", "separate dataset")
    create("complex", X.astype(np.complex64))
    refused("complex", "/inputs", "numbers are expected")
    with h5py.File(path("array_type.h5"), "w") as f:
        f.create_dataset("inputs", (6,), dtype=np.dtype(("f4", (4,))))[...] = X
        f["targets"] = Y
    refused("array_type", "/inputs", "array")
    with h5py.File(path("ragged.h5"), "w") as f:
        rows = f.create_dataset("inputs", (6,), dtype=h5py.vlen_dtype("f4"))
        for i in range(6):
            rows[i] = X[i, : 1 + i % 3]
        f["targets"] = Y
    refused("ragged", "/inputs", "variable length")
    with h5py.File(path("references.h5"), "w") as f:
        f["x"] = X
        f.create_dataset("inputs", data=[f["x"].ref] * 6, dtype=h5py.ref_dtype)
        f["targets"] = Y
    refused("references", "/inputs", "reference")
    create("opaque", np.zeros((6, 4), "V3"))
    refused("opaque", "/inputs", "opaque")
    create("float_classes", y=Y.astype("f4"))
    refused("float_classes", "/targets", "float32", "integers")


def targets():
    one_hot = np.eye(3)[Y]
    for dtype in ["f4", "f2", ">f8", "u1", ">i4", "?"]:
        name = "one_hot_" + dtype.replace(">", "big_").replace("?", "bool")
        create(name, y=one_hot.astype(dtype))
        right(name)
    create("one_hot_gzip", y=one_hot, y_options=dict(compression="gzip"))
    right("one_hot_gzip")
    create("column", y=Y.reshape(6, 1))
    right("column")
    create("column_of_numbers", y=X[:, :1])
    right("column_of_numbers", targets=X[:, 0], values=1)
    for name, row in [("two_ones", [1, 1, 0]), ("no_one", [0, 0, 0]), ("soft", [0.5, 0.5, 0]), ("minus", [1, -1, 1])]:
        wrong = one_hot.copy()
        wrong[4] = row
        create(name, y=wrong)
        refused(name, "/targets[4]", "one-hot")
    create("four_columns", y=np.eye(4)[Y])
    refused("four_columns", "/targets has rows of 4", "3")
    create("fewer_targets", y=Y[:5])
    refused("fewer_targets", "/inputs has 6 rows, but /targets has 5")


def shapes():
    with h5py.File(path("scalar.h5"), "w") as f:
        f["inputs"] = 1.5
        f["targets"] = Y
    refused("scalar", "/inputs is a scalar")
    with h5py.File(path("null.h5"), "w") as f:
        f["inputs"] = h5py.Empty("f4")
        f["targets"] = Y
    refused("null", "/inputs", "no elements")
    create("no_rows", X[:0], Y[:0])
    refused("no_rows", "/inputs has no samples")
    create("empty_rows", X[:, :0])
    refused("empty_rows", "/inputs has rows of 0")
    with h5py.File(path("too_large.h5"), "w") as f:
        f.create_dataset("inputs", (2**40, 2**30), chunks=(1, 1), dtype="f4")
        f["targets"] = Y
    refused("too_large", "/inputs")
    create("flat", X[:, 0])
    right("flat", X[:, 0], input=(1,))
    with h5py.File(path("group.h5"), "w") as f:
        f.create_group("inputs")
        f["targets"] = Y
    refused("group", "/inputs", "group")
    with h5py.File(path("deep.h5"), "w") as f:
        f["a/b/x"] = X
        f["a/y"] = Y
        f["a/b/x"].dims[0].label = "sample"
        f["scale"] = np.arange(6.0)
        f["scale"].make_scale("sample")
        f["a/b/x"].dims[0].attach_scale(f["scale"])
    right("deep", inputs="/a/b/x", targets_name="/a/y")


def layouts():
    create("gzip_shuffle_checksum", x_options=dict(chunks=(4, 3), compression="gzip", shuffle=True, fletcher32=True))
    right("gzip_shuffle_checksum")
    create("resizable", x_options=dict(maxshape=(None, 4), chunks=(4, 4)))
    right("resizable")
    create("scale_offset", (X * 8).astype("i4"), x_options=dict(scaleoffset=0))
    right("scale_offset", X * 8)
    if h5py.h5z.filter_avail(h5py.h5z.FILTER_SZIP) and h5py.h5z.get_filter_info(h5py.h5z.FILTER_SZIP) & 1:
        create("szip", x_options=dict(compression="szip"))
        right("szip", refused=("szip", "/inputs"))
    create("compact", x=None)
    with h5py.File(path("compact.h5"), "a") as f:
        layout = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        layout.set_layout(h5py.h5d.COMPACT)
        space = h5py.h5s.create_simple(X.shape)
        data = h5py.h5d.create(f.id, b"inputs", h5py.h5t.IEEE_F32LE, space, layout)
        data.write(h5py.h5s.ALL, h5py.h5s.ALL, X)
    right("compact")
    create("user_block", userblock_size=1024)
    right("user_block")
    create("earliest", libver="earliest")
    right("earliest")
    create("latest", libver="latest", x_options=dict(chunks=(2, 4)))
    right("latest", refused=("newer", "latest.h5"))
    create("tracked", track_order=True)
    right("tracked")


def filters():
    create("lzf", x_options=dict(compression="lzf"))
    refused("lzf", "/inputs", "LZF", "32000", "gzip")
    create("lzf_targets", y=Y, y_options=dict(compression="lzf"))
    refused("lzf_targets", "/targets", "LZF", "gzip")
    deflate = b"\x01\x00\x08\x00\x01\x00\x01\x00deflate\x00"
    others = {"blosc": 32001, "bitshuffle": 32008, "zfp": 32013, "zstd": 32015, "blosc2": 32026, "nobody": 40000}
    for name, number in others.items():
        create(name, x_options=dict(compression="gzip"))
        patch(name, deflate, number.to_bytes(2, "little") + deflate[2:])
        known = [] if name == "nobody" else [name]
        refused(name, "/inputs", str(number), "HDF5_PLUGIN_PATH", "h5repack", *known)


def newer():
    create("newer_superblock")
    patch("newer_superblock", b"\x89HDF\r\n\x1a\n\x00", b"\x89HDF\r\n\x1a\n\x09")
    refused("newer_superblock", "newer_superblock.h5", "version", "newer", "h5repack")
    create("newer_type")
    patch("newer_type", b"\x11\x20\x1f\x00\x04\x00\x00\x00\x00\x00\x20\x00", b"\xf1\x20\x1f\x00\x04\x00\x00\x00\x00\x00\x20\x00")
    refused("newer_type", "/inputs", "version", "newer", "h5repack")
    create("newer_layout", x_options=dict(chunks=(2, 4)))
    # Version 3, chunked, of three dimensions.
    patch("newer_layout", b"\x03\x02\x03", b"\x0e\x02\x03")
    refused("newer_layout", "/inputs", "newer", "h5repack")


def elsewhere():
    raw = path("elsewhere.raw")
    X.tofile(raw)
    create("raw", x=X, x_options=dict(external=[(raw, 0, X.nbytes)]))
    right("raw")
    name = path("gone.raw")
    create("raw_missing", x=X, x_options=dict(external=[(name, 0, X.nbytes)]))
    os.remove(name)
    refused("raw_missing", "raw_missing.h5", "/inputs", "gone.raw", "HDF5_EXTFILE_PREFIX")
    name = path("short.raw")
    create("raw_short", x=X, x_options=dict(external=[(name, 0, X.nbytes)]))
    os.truncate(name, X.nbytes - 4)
    refused("raw_short", "raw_short.h5", "/inputs", "short.raw", str(X.nbytes - 4))

    for i in range(2):
        with h5py.File(path("part%d.h5" % i), "w") as f:
            f["x"] = X[3 * i : 3 * i + 3]

    def virtual(name, sources, dataset="x", length=3):
        with h5py.File(path(name + ".h5"), "w") as f:
            layout = h5py.VirtualLayout((6, 4), "f4")
            for i, source in enumerate(sources):
                layout[3 * i : 3 * i + length] = h5py.VirtualSource(source, dataset, (length, 4))
            f.create_virtual_dataset("inputs", layout, fillvalue=-1)
            f["targets"] = Y

    virtual("virtual", ["part0.h5", path("part1.h5")])
    right("virtual")
    virtual("virtual_missing_file", ["part0.h5", "part9.h5"])
    refused("virtual_missing_file", "virtual_missing_file.h5", "/inputs", "part9.h5", "does not exist", "HDF5_VDS_PREFIX")
    virtual("virtual_missing_dataset", ["part0.h5", "part1.h5"], "nothing")
    refused("virtual_missing_dataset", "virtual_missing_dataset.h5", "/inputs", "part0.h5", "no dataset", "nothing")
    virtual("virtual_hole", ["part0.h5"])
    refused("virtual_hole", "/inputs", "12 of 24 elements")
    with h5py.File(path("part3.h5"), "w") as f:
        f["x"] = X[3:5]
    virtual("virtual_short", ["part0.h5", "part3.h5"])
    refused("virtual_short", "/inputs", "part3.h5", "2 x 4", "12 elements")
    with open(path("part4.h5"), "w") as f:
        f.write("no HDF5")
    virtual("virtual_of_text", ["part0.h5", "part4.h5"])
    refused("virtual_of_text", "/inputs", "part4.h5", "is not an HDF5 file")
    with h5py.File(path("virtual_itself.h5"), "w") as f:
        f["x"] = X
        layout = h5py.VirtualLayout((6, 4), "f4")
        layout[:] = h5py.VirtualSource(f["x"])
        f.create_virtual_dataset("inputs", layout)
        f["targets"] = Y
    right("virtual_itself")

    def link(name, what, **files):
        with h5py.File(path(name + ".h5"), "w") as f:
            f["elsewhere"] = X
            f["inputs"] = what
            f["targets"] = Y

    link("soft_link", h5py.SoftLink("/elsewhere"))
    right("soft_link")
    link("external_link", h5py.ExternalLink("f32.h5", "/inputs"))
    right("external_link")
    link("broken_soft_link", h5py.SoftLink("/nowhere/x"))
    refused("broken_soft_link", "/inputs", "soft link", "/nowhere/x")
    link("broken_external_link", h5py.ExternalLink("lost.h5", "/x"))
    refused("broken_external_link", "/inputs", "external link", "lost.h5", "/x", "HDF5_EXT_PREFIX")
    link("external_link_to_nothing", h5py.ExternalLink("f32.h5", "/x"))
    refused("external_link_to_nothing", "/inputs", "external link", "f32.h5", "/x")
    link("link_to_itself", h5py.SoftLink("/inputs"))
    refused("link_to_itself", "/inputs", "soft link")


def unwritten():
    for name, options in [("never_written", {}), ("never_written_chunks", dict(chunks=(2, 4), fillvalue=7))]:
        with h5py.File(path(name + ".h5"), "w") as f:
            f.create_dataset("inputs", (6, 4), "f4", **options)
            f["targets"] = Y
        refused(name, "/inputs", "never written", "fill value")
    with h5py.File(path("zeros.h5"), "w") as f:
        f["inputs"] = X * 0
        f["targets"] = Y
    right("zeros", X * 0)
    # The writer ends without closing the file.
    script = "import h5py, os, sys; f = h5py.File(sys.argv[1], 'w', libver='latest'); f['inputs'] = 1; f.flush(); os._exit(0)"
    subprocess.run([sys.executable, "-c", script, path("left_open.h5")], check=True)
    refused("left_open", "left_open.h5", "open for writing", "h5clear")
    with open(path("text.h5"), "w") as f:
        f.write("a,b\n1,2\n")
    refused("text", "text.h5", "is not an HDF5 file")
    open(path("nothing.h5"), "w").close()
    refused("nothing", "nothing.h5", "is not an HDF5 file")
    create("truncated", np.zeros((600, 4)))
    os.truncate(path("truncated.h5"), 3000)
    refused("truncated", "truncated.h5", "damaged or truncated", damaged=True)
    with open(path("garbage.h5"), "wb") as f:
        f.write(b"\x89HDF\r\n\x1a\n\x00" + bytes(range(1, 200)))
    refused("garbage", "garbage.h5", "damaged", damaged=True)
    create("bad_chunk", x_options=dict(chunks=(6, 4), fletcher32=True))
    patch("bad_chunk", X.tobytes(), X.tobytes()[:-1] + b"\x7f")
    refused("bad_chunk", "/inputs", "damaged", damaged=True)
    with h5py.File(path("family_%d.h5"), "w", driver="family", memb_size=2048) as f:
        f["inputs"] = np.zeros((600, 4))
    os.rename(path("family_0.h5"), path("family.h5"))
    refused("family", "family.h5", "family", "h5repart")


def netcdf():
    """Numbers as NetCDF packs them: with h5py, whose attributes have the types that NetCDF's libraries give them."""

    def packed(name, x, y=Y, on="inputs", **attributes):
        create(name, x, y)
        with h5py.File(path(name + ".h5"), "a") as f:
            for key, value in attributes.items():
                f[on].attrs[key] = value

    stored = np.array([[-32000, -1, 0, 1], [2, 3, 4, 32767]] * 3, "i2")
    packed("scaled", stored, scale_factor=0.01, add_offset=273.15)
    right("scaled", stored * 0.01 + 273.15)
    packed("scaled_as_array", stored, scale_factor=np.array([0.5], "f4"))
    right("scaled_as_array", stored * 0.5)
    packed("only_offset", stored, add_offset=np.float32(100))
    right("only_offset", stored + 100.0)
    packed("scaled_big", stored.astype(">i2"), scale_factor=0.01, add_offset=273.15)
    right("scaled_big", stored * 0.01 + 273.15)
    # Rounded to f32 before they are scaled they would lose their last digits.
    large = np.array([[2**30 + 1, 2**30 + 2, -(2**30) - 3, 7]] * 6, "i4")
    for name, kind in [("scaled_wide", "<i4"), ("scaled_wide_big", ">i4")]:
        packed(name, large.astype(kind), scale_factor=1e-6, add_offset=-1073.0)
        right(name, large * 1e-6 - 1073.0)
    create("scaled_gzip", stored, x_options=dict(chunks=(2, 4), compression="gzip"))
    with h5py.File(path("scaled_gzip.h5"), "a") as f:
        f["inputs"].attrs["scale_factor"] = 0.25
    right("scaled_gzip", stored * 0.25)
    packed("scaled_then_standard", stored, scale_factor=0.5, mean=np.float32([1]), std=np.float32([2]))
    right("scaled_then_standard", ((stored * 0.5).astype("f4") - np.float32(1)) / np.float32(2))
    packed("scaled_targets", X, stored, on="targets", scale_factor=0.5, add_offset=1.0)
    right("scaled_targets", targets=stored * 0.5 + 1, values=4)
    packed("scaled_classes", X, on="targets", scale_factor=0.5)
    refused("scaled_classes", "/targets", "scale_factor 0.5", "integers")
    packed("plain_scale", X, on="targets", scale_factor=1.0, add_offset=0.0)
    right("plain_scale")
    bytes_ = np.array([[-128, -1, 0, 127]] * 6, "i1")
    packed("unsigned", bytes_, _Unsigned="true", scale_factor=2.0, _FillValue=np.int8(-2))
    right("unsigned", bytes_.view("u1") * 2.0)
    packed("unsigned_ascii", bytes_, _Unsigned=np.bytes_("true"))
    right("unsigned_ascii", bytes_.view("u1"))
    packed("signed", bytes_.view("u1"), _Unsigned="false")
    right("signed", bytes_)
    packed("unsigned_maybe", bytes_, _Unsigned="maybe")
    refused("unsigned_maybe", "_Unsigned", "/inputs", "maybe")
    packed("unsigned_missing", bytes_, _Unsigned="true", _FillValue=np.int8(-1))
    refused("unsigned_missing", "/inputs[0, 1] is missing: 255 is its _FillValue")

    packed("filled", stored, scale_factor=0.01, _FillValue=np.int16(32767))
    refused("filled", "filled.h5", "/inputs[1, 3] is missing: 32767 is its _FillValue")
    # Variables without the attribute, as the NetCDF library writes them.
    for name, marks in [("filled_by_netcdf", {"_NCProperties": np.bytes_("version=2,netcdf=4.10.1,hdf5=2.2.0")}),
                        ("filled_by_others", {})]:
        create(name, stored, x_options=dict(fillvalue=32767))
        with h5py.File(path(name + ".h5"), "a") as f:
            f.attrs.update(marks)
    refused("filled_by_netcdf", "/inputs[1, 3] is missing: 32767 is its fill value by NetCDF")
    right("filled_by_others", stored)
    packed("filled_big", stored.astype(">i2"), _FillValue=np.array(32767, ">i2"))
    refused("filled_big", "/inputs[1, 3] is missing: 32767 is its _FillValue")
    packed("not_filled", stored, _FillValue=np.int16(-32768), missing_value=np.array([9, 10], "i2"))
    right("not_filled", stored)
    packed("missing_values", stored, missing_value=np.array([9, 4], "i2"))
    refused("missing_values", "/inputs[1, 2] is missing: 4 is its missing_value")
    floats = X.copy()
    floats[2, 1] = 1e20
    packed("filled_float", floats, _FillValue=np.float32(1e20))
    refused("filled_float", "/inputs[2, 1] is missing", "_FillValue")
    # The attribute has a wider type than the elements.
    packed("missing_double", floats, missing_value=1e20)
    refused("missing_double", "/inputs[2, 1] is missing", "missing_value")
    packed("filled_nan", X, _FillValue=np.float32("nan"))
    right("filled_nan")
    packed("filled_classes", X, on="targets", _FillValue=np.int64(2))
    refused("filled_classes", "/targets[2] is missing: 2 is its _FillValue")
    packed("valid_range", stored, valid_range=np.array([-32000, 32767], "i2"))
    right("valid_range", stored)
    packed("valid_min", stored, valid_min=np.int16(-10))
    refused("valid_min", "/inputs[0, 0] is missing: -32000 is beyond its valid_min of -10")
    # Floating-point bounds of packed integers apply to the elements.
    packed("valid_max", stored, scale_factor=0.5, valid_max=np.float32(16000))
    refused("valid_max", "/inputs[1, 3] is missing: 32767 is beyond its valid_max of 16000")
    packed("valid_elements", stored, scale_factor=0.5, valid_range=np.float32([-16000, 16383.5]))
    right("valid_elements", stored * 0.5)
    packed("odd_scale", stored, scale_factor="a half")
    refused("odd_scale", "scale_factor", "/inputs", "not a number")
    packed("unit_of_scaled", np.zeros((6, 4), "u1"), scale_factor=0.5)
    right("unit_of_scaled", np.zeros((6, 4)))

    with h5py.File(path("dimensions.h5"), "w") as f:
        f["inputs"], f["targets"] = X, Y
        f["time"] = np.arange(6.0)
        f["time"].make_scale("time")
        f["inputs"].dims[0].attach_scale(f["time"])
    right("dimensions")


for make in [types, targets, shapes, layouts, filters, newer, elsewhere, unwritten, netcdf]:
    make()
json.dump(CASES, sys.stdout)
