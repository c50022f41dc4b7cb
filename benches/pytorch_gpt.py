"""The peer: a GPT training step in PyTorch (scaled_dot_product_attention, fused AdamW), tokens a second. As a training
loop does, a step draws a batch from tokens in memory, clips, decays matrices only, and reads the loss.

    python benches/pytorch_gpt.py char 2 100 compile     # size, threads, steps, mode; prints the median over steps

Modes: eager, compile (torch.compile), compile-bf16 (the same with autocast to bf16).
"""
import statistics
import sys
import time

import torch
from torch import nn
from torch.nn import functional as F

# layers, heads, width, context, batch, vocabulary, bias
SIZES = {"char": (4, 4, 128, 64, 12, 65, False), "baby": (6, 6, 384, 256, 8, 65, False), "gpt2-124m": (12, 12, 768, 64, 4, 50257, True)}


class Block(nn.Module):
    def __init__(self, width, heads, bias):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width, bias=bias), nn.LayerNorm(width, bias=bias)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=bias), nn.Linear(width, width, bias=bias)
        self.up, self.down = nn.Linear(width, 4 * width, bias=bias), nn.Linear(4 * width, width, bias=bias)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = (p.view(b, t, self.heads, -1).transpose(1, 2) for p in self.qkv(self.norm1(x)).split(d, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Gpt(nn.Module):
    def __init__(self, layers, heads, width, context, vocabulary, bias):
        super().__init__()
        self.words, self.places = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads, bias) for _ in range(layers)))
        self.norm = nn.LayerNorm(width, bias=bias)

    def forward(self, tokens, targets):
        x = self.words(tokens) + self.places.weight
        logits = F.linear(self.norm(self.blocks(x)), self.words.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def median(model, size, batch, steps, mode="eager"):
    """Seconds of a training step on `batch` random samples, the median of so many."""
    _, _, _, context, _, vocabulary, _ = SIZES[size]
    groups = [{"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.1},
              {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-4, betas=(0.9, 0.99), fused=True)
    forward = model if mode == "eager" else torch.compile(model)
    data = torch.randint(vocabulary, (1 << 16,))

    def step():
        starts = torch.randint(len(data) - context - 1, (batch,))
        tokens = torch.stack([data[i:i + context] for i in starts])
        targets = torch.stack([data[i + 1:i + 1 + context] for i in starts])
        with torch.autocast("cpu", torch.bfloat16, enabled=mode == "compile-bf16"):
            loss = forward(tokens, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    for _ in range(5):
        step()
    seconds = []
    for _ in range(steps):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def main():
    size, threads, steps, mode = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    torch.set_num_threads(threads)
    torch.manual_seed(1)
    layers, heads, width, context, batch, vocabulary, bias = SIZES[size]
    model = Gpt(layers, heads, width, context, vocabulary, bias)
    print(batch * context / median(model, size, batch, steps, mode))


if __name__ == "__main__":
    main()
