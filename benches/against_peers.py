"""hpctrain against PyTorch and others on this machine: all in turn, and the ratio pair by pair.

    python benches/against_peers.py [--pairs 5] [--size char|baby|gpt2-124m|mlp|cnn] [--peers pytorch,ddp,candle,burn]
                                    [--precision f32|bf16] [--zero 0|1|2|3]

Needs a release build and, for the Python that runs this, torch (and h5py, but for char and baby). hpctrain trains for real: it
reads shards, clips, writes metrics; its figure is the median step of a run. A peer's is the median step of a loop
over data in memory. `pytorch` has two threads and a fused AdamW: the faster of eager and torch.compile, beside bf16 also of
torch.compile with autocast to bf16 (language models). `ddp` has two processes of one thread (language models, eager), `candle` and `burn` two threads; they want
`cargo build --release --manifest-path benches/rust-peers/Cargo.toml`. `ddp` is compared with two ranks of one thread (2x1), the others
with one of two (1x2). `--peers ""` is for no peer, `--zero` the stage of two ranks.
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HPCTRAIN = os.environ.get("HPCTRAIN", str(ROOT / "target/release/hpctrain"))
RUST_PEERS = Path(os.environ.get("RUST_PEERS", ROOT / "benches/rust-peers/target/release"))
MPI = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMPI_MCA_rmaps_base_oversubscribe": "1"}
SETTINGS = {
    "char": ["batch.global=12", "run.steps=150"],
    "baby": ["batch.global=8", "model.dropout=0", "run.steps=15"],
    "gpt2-124m": ["batch.global=4", "model.context=64", "model.vocabulary=50257", "run.steps=10", "eval.batch=4"],
    "mlp": [],
    "cnn": [],
}
LAYERS = ("mlp", "cnn")
# Presets that come with their data.
BUNDLED = {"char": "gpt-char", "baby": "gpt-baby"}


def tokens(directory):
    """Random GPT-2 tokens as shards of foreign make."""
    import h5py
    import numpy

    for name in ("train-0.h5", "val-0.h5"):
        with h5py.File(directory / name, "w") as file:
            file["tokens"] = numpy.random.default_rng(1).integers(50257, size=65_537, dtype="uint16")


def samples(directory):
    """Random numbers and classes as shards of foreign make."""
    import h5py
    import numpy

    rng = numpy.random.default_rng(1)
    for name, rows in (("train-0.h5", 4096), ("val-0.h5", 64)):
        with h5py.File(directory / name, "w") as file:
            file["inputs"] = rng.random((rows, 784), dtype="float32")
            file["targets"] = rng.integers(10, size=rows, dtype="uint8")


def hpctrain(size, precision, zero, ranks, threads, work):
    settings = SETTINGS[size] + [f"precision.dtype={precision}", f"run.root={work}", f"run.threads={threads}", "eval.samples=8", "log.sample_tokens=0"]
    if size not in BUNDLED:
        settings.append(f"data.path={work}")
    launcher = ["mpirun", "-np", str(ranks)] if ranks > 1 else []
    if ranks > 1:
        settings.append(f"parallel.zero={zero}")
    source = ["--preset", BUNDLED.get(size, size)]
    if size in LAYERS:
        source = ["--config", str(ROOT / f"benches/{size}.toml")]
    command = launcher + [HPCTRAIN, "train", *source]
    run = tempfile.mkdtemp(dir=work)
    settings.append(f"run.name={Path(run).name}")
    os.rmdir(run)
    for setting in settings:
        command += ["--set", setting]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=os.environ | MPI)
    result = json.loads((Path(run) / "run.json").read_text())["tokens_per_second"]
    subprocess.run(["rm", "-r", run], check=True)
    return result


def pytorch(size, precision, threads):
    """The fastest of PyTorch's modes."""
    modes = ["eager", "compile"]
    if size in LAYERS:
        script, steps = "pytorch_layers.py", "300" if size == "mlp" else "100"
    else:
        script, steps = "pytorch_gpt.py", {"char": "100", "baby": "10"}.get(size, "8")
        modes += ["compile-bf16"] if precision == "bf16" else []
    command = [sys.executable, ROOT / "benches" / script, size, str(threads), steps]
    return max(float(subprocess.check_output([*command, mode])) for mode in modes)


def ddp(size):
    steps = {"char": "100", "baby": "10"}.get(size, "8")
    return float(subprocess.check_output([sys.executable, ROOT / "benches/pytorch_ddp.py", size, "2", steps]))


def rust(name, size):
    steps = {"mlp": "300", "cnn": "100", "char": "50", "baby": "6"}.get(size, "4")
    command = [str(RUST_PEERS / name), size, steps]
    return float(subprocess.check_output(command, env=os.environ | {"RAYON_NUM_THREADS": "2"}))


PEERS = {
    "pytorch": lambda size, precision: pytorch(size, precision, 2),
    "ddp": lambda size, _: ddp(size),
    "candle": lambda size, _: rust("candle", size),
    "burn": lambda size, _: rust("burn", size),
}


def main():
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--pairs", type=int, default=5)
    arguments.add_argument("--size", choices=SETTINGS, default="char")
    arguments.add_argument("--peers", default="pytorch")
    arguments.add_argument("--precision", choices=("f32", "bf16"), default="f32")
    arguments.add_argument("--zero", type=int, choices=range(4), default=0, help="stage of two ranks")
    arguments = arguments.parse_args()
    peers = [peer for peer in arguments.peers.split(",") if peer]
    names = ["1x2", "2x1", "2x1/1x2"] + [column for peer in peers for column in (peer, f"ours/{peer}")]
    rows = []

    def show(title, row):
        print(title, *(f"{name} {value:.{2 if '/' in name else 0}f}" for name, value in zip(names, row)), sep="  ", flush=True)

    with tempfile.TemporaryDirectory() as work:
        work = Path(work)
        if arguments.size in LAYERS:
            samples(work)
        elif arguments.size not in BUNDLED:
            tokens(work)
        for pair in range(arguments.pairs):
            one, two = (
                hpctrain(arguments.size, arguments.precision, arguments.zero, *layout, work) for layout in ((1, 2), (2, 1))
            )
            row = [one, two, two / one]
            for peer in peers:
                speed = PEERS[peer](arguments.size, arguments.precision)
                row += [speed, (two if peer == "ddp" else one) / speed]
            rows.append(row)
            show(pair + 1, row)
    show("median", [statistics.median(column) for column in zip(*rows)])


if __name__ == "__main__":
    main()
