"""The peer of benches/mlp.toml and benches/cnn.toml: a training step in PyTorch with fused AdamW and clipping, samples a
second. As a training loop does, a step draws a batch from samples in memory and reads the loss.

    python benches/pytorch_layers.py mlp 2 300 eager     # network, threads, steps, eager or compile; prints the median

Subnormal numbers are flushed to zero: without, moments of weights behind dead rectifiers make PyTorch slow.
"""
import statistics
import sys
import time

import torch
from torch import nn
from torch.nn import functional as F

BATCH = {"mlp": 128, "cnn": 64}


def network(kind):
    if kind == "mlp":
        return nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    return nn.Sequential(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2),
                         nn.Flatten(), nn.Linear(1600, 128), nn.ReLU(), nn.Linear(128, 10))


def main():
    kind, threads, steps, mode = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    torch.set_num_threads(threads)
    torch.set_flush_denormal(True)
    torch.manual_seed(1)
    model = network(kind)
    forward = torch.compile(model) if mode == "compile" else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    data = torch.rand(4096, *((784,) if kind == "mlp" else (1, 28, 28)))
    classes = torch.randint(10, (4096,))

    def step():
        chosen = torch.randint(4096, (BATCH[kind],))
        optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(forward(data[chosen]), classes[chosen])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.item()

    for _ in range(20):
        step()
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    print(BATCH[kind] / statistics.median(times))


if __name__ == "__main__":
    main()
