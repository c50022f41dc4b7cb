"""The peer on a GPU: GPT-2 124M in PyTorch, tokens a second, for scripts/gpu-verify.

    python benches/pytorch_gpt_gpu.py --micro 16 --global 64 [--steps 30] [--modes compile-bf16-cudnn,compile-bf16]

The same network, batch and work as `hpctrain train --preset gpt2-124m`: a step takes `global` samples in micro-batches
of `micro`, clips, decays matrices only, and reads the loss. The batch is drawn from tokens in memory. Prints one line of
JSON a mode:

- compile-bf16: bf16 parameters with fp32 master weights, gradients and moments, torch.compile;
- compile-autocast: f32 parameters, bf16 autocast, torch.compile;
- eager-autocast: the same without torch.compile;
- each of them with -cudnn: attention by cuDNN alone, which is an error where PyTorch, the GPU or the shape lacks it.
  Without it PyTorch selects: FlashAttention-2, for this network.

All use scaled_dot_product_attention, fused AdamW, and TF32 for the remaining f32 GEMMs.
"""
import argparse
import contextlib
import json
import statistics
import time

import torch
from torch import nn
from torch.nn import functional as F

LAYERS, HEADS, WIDTH, CONTEXT, VOCABULARY = 12, 12, 768, 1024, 50_304


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = (p.view(b, t, self.heads, -1).transpose(1, 2) for p in self.qkv(self.norm1(x)).split(d, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Gpt(nn.Module):
    def __init__(self, layers, heads, width, context, vocabulary):
        super().__init__()
        self.words, self.places = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        for parameter in self.parameters():
            if parameter.dim() >= 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens, targets):
        x = self.words(tokens) + self.places.weight
        logits = F.linear(self.norm(self.blocks(x)), self.words.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def groups(parameters):
    return [{"params": [p for p in parameters if p.dim() >= 2], "weight_decay": 0.1},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0}]


CUDNN = "-cudnn"
MODES = [f"{mode}{attention}" for mode in ("compile-bf16", "compile-autocast", "eager-autocast")
         for attention in (CUDNN, "")]


def attention_of(mode):
    """The context in which scaled_dot_product_attention takes the backend of a mode."""
    if not mode.endswith(CUDNN):
        return contextlib.nullcontext()
    # PyTorch before 2.5 has no such backend.
    from torch.nn.attention import SDPBackend, sdpa_kernel
    return sdpa_kernel(SDPBackend.CUDNN_ATTENTION)


def measure(mode, arguments, device):
    """Seconds of each step after the first ones, the last loss, and the most memory taken."""
    if mode not in MODES:
        raise ValueError(f"no such mode; there are {', '.join(MODES)}")
    with attention_of(mode):
        return measure_steps(mode.replace(CUDNN, ""), arguments, device)


def measure_steps(mode, arguments, device):
    """As `measure`, with the attention that is selected where it is called."""
    torch.manual_seed(1)
    # A graph that was compiled with other attention would be found again: the models are equal.
    if hasattr(torch, "compiler"):
        torch.compiler.reset()
    torch.set_float32_matmul_precision("high")
    is_cuda = device == "cuda"
    if is_cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    shape = (1, 1, 64, 16, 512) if arguments.small else (LAYERS, HEADS, WIDTH, CONTEXT, VOCABULARY)
    context, vocabulary = shape[3:]
    model = Gpt(*shape).to(device)
    kept = list(model.parameters())
    masters = [p.detach().clone().requires_grad_() for p in kept] if mode.endswith("bf16") else kept
    if masters is not kept:
        model.bfloat16()
        for master in masters:
            master.grad = torch.zeros_like(master)
    optimizer = torch.optim.AdamW(groups(masters), lr=6e-4, betas=(0.9, 0.95), fused=is_cuda)
    cast = torch.autocast(device, torch.bfloat16) if mode.endswith("autocast") else contextlib.nullcontext()
    forward = torch.compile(model) if mode.startswith("compile") else model
    data = torch.randint(vocabulary, (1 << 20,))
    offsets = torch.arange(context + 1)
    num_micro = arguments.batch // arguments.micro

    def step():
        total = torch.zeros((), device=device)
        for _ in range(num_micro):
            starts = torch.randint(len(data) - context - 1, (arguments.micro, 1))
            window = data[starts + offsets]
            if is_cuda:
                window = window.pin_memory().to(device, non_blocking=True)
            with cast:
                loss = forward(window[:, :-1], window[:, 1:]) / num_micro
            loss.backward()
            total += loss.detach()
            if masters is not kept:
                # Gradients of micro-batches are summed in f32.
                torch._foreach_add_([m.grad for m in masters], [p.grad for p in kept])
                for parameter in kept:
                    parameter.grad = None
        nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        if masters is not kept:
            with torch.no_grad():
                torch._foreach_copy_(kept, masters)
            torch._foreach_zero_([m.grad for m in masters])
        else:
            optimizer.zero_grad(set_to_none=True)
        return total.item()

    for _ in range(arguments.warm):
        step()
    seconds = []
    for _ in range(arguments.steps):
        start = time.perf_counter()
        loss = step()
        seconds.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() if is_cuda else None
    return seconds, loss, peak, arguments.batch * context


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--micro", type=int, default=16)
    parser.add_argument("--global", type=int, default=64, dest="batch")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--warm", type=int, default=10)
    parser.add_argument("--modes", default=",".join(MODES), help="separated by commas; default: all")
    parser.add_argument("--small", action="store_true", help="a tiny network, also on a CPU: only that it runs")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not arguments.small:
        parser.error("PyTorch finds no GPU")
    failed = 0
    for mode in arguments.modes.split(","):
        row = {"mode": mode, "micro": arguments.micro, "global": arguments.batch, "torch": torch.__version__}
        try:
            seconds, loss, peak, tokens = measure(mode, arguments, device)
            median = statistics.median(seconds)
            row.update(tokens_per_second=tokens / median, step_ms=1e3 * median, loss=loss, peak_bytes=peak)
        except Exception as e:  # pylint: disable=broad-except
            # One mode that does not run leaves the others.
            row["error"] = f"{type(e).__name__}: {e}"[:500]
            failed += 1
        print(json.dumps(row), flush=True)
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
