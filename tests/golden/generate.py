"""Writes gpt.h5, llama.h5, layers.h5, optimizers.h5 and ops.h5 next to this file: reference numbers from PyTorch (see README.md).

Initial values and inputs are rounded to f32 first; everything else is computed from them in f64.
"""

import functools
import math
import pathlib

import h5py
import numpy as np
import torch
import torch.nn.functional as F

HERE = pathlib.Path(__file__).parent
CONFIG = dict(layers=2, heads=3, width=24, context=13, vocabulary=37, batch=5)
LLAMA = dict(layers=2, heads=4, width=24, hidden=40, context=13, vocabulary=37, batch=5, rope_theta=100.0, epsilon=1e-5)
# Heads of keys and values, whether the head is the token table, and the scaling of the frequencies of rotary positions. The three
# frequencies of `llama3` are kept, interpolated and divided; its context of 13 is longer than the original one.
LLAMA_CASES = dict(grouped=dict(kv_heads=2, tied=False, rope_type="default"),
                   tied=dict(kv_heads=4, tied=True, rope_type="default"),
                   linear=dict(kv_heads=2, tied=False, rope_type="linear", factor=2.5),
                   llama3=dict(kv_heads=2, tied=False, rope_type="llama3", factor=4.0, low_freq_factor=0.125,
                               high_freq_factor=1.0, original_max_position_embeddings=8))
STEPS = 10
ADAMW = dict(lr=1e-2, warmup_steps=3, total_steps=STEPS, min_lr=1e-3, schedule="cosine", beta1=0.9, beta2=0.95,
             eps=1e-8, weight_decay=0.1, grad_clip=1.0)
SGD = dict(lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01)


# --- the operations, written out ---

def layer_norm(x, weight, bias=None, eps=1e-5):
    centred = x - x.mean(-1, keepdim=True)
    y = centred / torch.sqrt((centred ** 2).mean(-1, keepdim=True) + eps) * weight
    return y if bias is None else y + bias


def gelu(x):
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x ** 3)))


def attention(qkv, heads):
    """Causal. qkv [B, T, 3*D]: first all of q, then k, then v; head h owns columns h*hd.. of each. Returns [B, T, D]."""
    b, t, d = qkv.shape[0], qkv.shape[1], qkv.shape[2] // 3
    q, k, v = (part.reshape(b, t, heads, d // heads).transpose(1, 2) for part in qkv.split(d, dim=-1))
    scores = q @ k.transpose(-1, -2) / math.sqrt(d // heads)
    future = torch.ones(t, t, dtype=torch.bool).triu(1)
    weights = scores.masked_fill(future, -math.inf).softmax(-1)
    return (weights @ v).transpose(1, 2).reshape(b, t, d)


def rms_norm(x, weight, eps):
    return x / torch.sqrt((x ** 2).mean(-1, keepdim=True) + eps) * weight


def scaled(frequency, scaling):
    """A frequency in radians per position, scaled for a longer context."""
    if scaling["rope_type"] == "default":
        return frequency
    if scaling["rope_type"] == "linear":
        return frequency / scaling["factor"]
    # llama3: by wavelengths in positions, short ones first.
    wavelength, original = 2 * math.pi / frequency, scaling["original_max_position_embeddings"]
    longest, shortest = original / scaling["low_freq_factor"], original / scaling["high_freq_factor"]
    if wavelength < shortest:
        return frequency
    if wavelength > longest:
        return frequency / scaling["factor"]
    share = (original / wavelength - scaling["low_freq_factor"]) / (scaling["high_freq_factor"] - scaling["low_freq_factor"])
    return share * frequency + (1 - share) * frequency / scaling["factor"]


def rotated(x, frequencies):
    """x [B, heads, T, w]: elements i and i + w/2 are a complex number, turned by t·frequencies[i]."""
    time, half = x.shape[-2], x.shape[-1] // 2
    angles = torch.arange(time, dtype=x.dtype)[:, None] * frequencies
    turned = torch.complex(x[..., :half].contiguous(), x[..., half:].contiguous()) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([turned.real, turned.imag], dim=-1)


def grouped_attention(q, k, v, frequencies):
    """Causal, with rotary positions. q [B, heads, T, w], k and v [B, kv_heads, T, w]. Returns [B, T, heads * w]."""
    b, heads, t, w = q.shape
    q, k = rotated(q, frequencies), rotated(k, frequencies)
    k, v = (x.repeat_interleave(heads // x.shape[1], dim=1) for x in (k, v))
    future = torch.ones(t, t, dtype=torch.bool).triu(1)
    weights = (q @ k.transpose(-1, -2) / math.sqrt(w)).masked_fill(future, -math.inf).softmax(-1)
    return (weights @ v).transpose(1, 2).reshape(b, t, heads * w)


def cross_entropy(logits, targets):
    """Loss of each row."""
    return logits.logsumexp(-1) - logits.gather(-1, targets[:, None])[:, 0]


# --- the network ---

def shapes(layers, width, context, vocabulary, bias, **_):
    out = {"wte.weight": (vocabulary, width), "wpe.weight": (context, width)}

    def add(name, *shape):
        out[f"{name}.weight"] = shape
        if bias:
            out[f"{name}.bias"] = shape[:1]

    for i in range(layers):
        add(f"h.{i}.ln_1", width)
        add(f"h.{i}.attn.c_attn", 3 * width, width)
        add(f"h.{i}.attn.c_proj", width, width)
        add(f"h.{i}.ln_2", width)
        add(f"h.{i}.mlp.c_fc", 4 * width, width)
        add(f"h.{i}.mlp.c_proj", width, 4 * width)
    add("ln_f", width)
    return out


def gpt(params, tokens):
    """Logits [B, T, V]. Pre-norm GPT-2 with learned positions and the head tied to wte."""

    def linear(x, name):
        y = x @ params[f"{name}.weight"].T
        return y + params[f"{name}.bias"] if f"{name}.bias" in params else y

    def norm(x, name):
        return layer_norm(x, params[f"{name}.weight"], params.get(f"{name}.bias"))

    x = params["wte.weight"][tokens] + params["wpe.weight"][:tokens.shape[1]]
    for i in range(CONFIG["layers"]):
        mix = attention(linear(norm(x, f"h.{i}.ln_1"), f"h.{i}.attn.c_attn"), CONFIG["heads"])
        x = x + linear(mix, f"h.{i}.attn.c_proj")
        x = x + linear(gelu(linear(norm(x, f"h.{i}.ln_2"), f"h.{i}.mlp.c_fc")), f"h.{i}.mlp.c_proj")
    return norm(x, "ln_f") @ params["wte.weight"].T


def llama_shapes(layers, heads, kv_heads, width, hidden, vocabulary, tied, **_):
    out = {"embed_tokens.weight": (vocabulary, width)}
    keys = width // heads * kv_heads
    for i in range(layers):
        of_block = {"input_layernorm": (width,), "self_attn.q_proj": (width, width), "self_attn.k_proj": (keys, width),
                    "self_attn.v_proj": (keys, width), "self_attn.o_proj": (width, width),
                    "post_attention_layernorm": (width,), "mlp.gate_proj": (hidden, width),
                    "mlp.up_proj": (hidden, width), "mlp.down_proj": (width, hidden)}
        out.update({f"layers.{i}.{name}.weight": shape for name, shape in of_block.items()})
    out["norm.weight"] = (width,)
    if not tied:
        out["lm_head.weight"] = (vocabulary, width)
    return out


def llama(params, tokens, layers, heads, kv_heads, width, rope_theta, epsilon, tied, **scaling):
    """Logits [B, T, V]. Pre-norm with RMS norms, rotary positions, grouped-query attention and SwiGLU."""
    b, t = tokens.shape
    half = width // heads // 2
    frequencies = rope_theta ** (-torch.arange(half, dtype=torch.float64) / half)
    frequencies = torch.tensor([scaled(frequency, scaling) for frequency in frequencies.tolist()], dtype=torch.float64)

    def linear(x, name):
        return x @ params[f"{name}.weight"].T

    x = params["embed_tokens.weight"][tokens]
    for i in range(layers):
        h = rms_norm(x, params[f"layers.{i}.input_layernorm.weight"], epsilon)
        q, k, v = (linear(h, f"layers.{i}.self_attn.{part}_proj").reshape(b, t, n, -1).transpose(1, 2)
                   for part, n in [("q", heads), ("k", kv_heads), ("v", kv_heads)])
        x = x + linear(grouped_attention(q, k, v, frequencies), f"layers.{i}.self_attn.o_proj")
        h = rms_norm(x, params[f"layers.{i}.post_attention_layernorm.weight"], epsilon)
        gate = linear(h, f"layers.{i}.mlp.gate_proj")
        x = x + linear(gate * torch.sigmoid(gate) * linear(h, f"layers.{i}.mlp.up_proj"), f"layers.{i}.mlp.down_proj")
    table = params["embed_tokens.weight" if tied else "lm_head.weight"]
    return rms_norm(x, params["norm.weight"], epsilon) @ table.T


def backward(network, params, tokens, targets):
    """Fresh gradients of the mean loss into params; returns (loss, logits)."""
    for p in params.values():
        p.grad = None
    logits = network(params, tokens)
    loss = cross_entropy(logits.flatten(0, 1), targets.flatten()).mean()
    loss.backward()
    return loss.detach(), logits.detach()


def leaves(values):
    return {n: v.double().clone().requires_grad_() for n, v in values.items()}


def decay_groups(params, decay):
    """Weight decay for matrices only."""
    return [dict(params=[p for p in params.values() if p.ndim >= 2], weight_decay=decay),
            dict(params=[p for p in params.values() if p.ndim < 2], weight_decay=0.0)]


def adamw_lr(step):
    s = ADAMW
    if step < s["warmup_steps"]:
        return s["lr"] * (step + 1) / s["warmup_steps"]
    done = (step - s["warmup_steps"]) / (s["total_steps"] - s["warmup_steps"])
    return s["min_lr"] + 0.5 * (s["lr"] - s["min_lr"]) * (1 + math.cos(math.pi * done))


# --- writing ---

def put(group, name, value):
    """Stored as it comes, except that indices become u32."""
    value = value.detach().numpy() if isinstance(value, torch.Tensor) else np.asarray(value)
    group.create_dataset(name, data=value.astype(np.uint32) if value.dtype == np.int64 else value)


def put_all(group, values, dtype):
    for name, value in values.items():
        put(group, name, value.to(dtype))


def attributes(group, values):
    for name, value in values.items():
        group.attrs[name] = np.bytes_(value) if isinstance(value, str) else value


def normal(rng, *shape, scale=1.0, shift=0.0):
    return torch.from_numpy((shift + scale * rng.standard_normal(shape)).astype(np.float32))


def write_case(group, rng, config, shapes, network):
    """`network` gives the logits of (parameters, tokens); `shapes` those of its parameters."""
    attributes(group, config)
    initial = {}
    for name, shape in shapes.items():
        scale_of_norm = ("ln_" in name or "norm" in name) and name.endswith("weight")
        initial[name] = normal(rng, *shape, scale=0.08, shift=1.0 if scale_of_norm else 0.0)
    batches = (STEPS, config["batch"], config["context"])
    tokens, targets = (torch.from_numpy(rng.integers(config["vocabulary"], size=batches)) for _ in range(2))
    put_all(group.create_group("params"), initial, torch.float32)
    put(group, "tokens", tokens)
    put(group, "targets", targets)

    params = leaves(initial)
    loss, logits = backward(network, params, tokens[0], targets[0])
    put(group, "loss", loss)
    put(group, "logits", logits)
    put_all(group.create_group("grads"), {n: p.grad for n, p in params.items()}, torch.float64)

    params = leaves(initial)
    optimizer = torch.optim.AdamW(decay_groups(params, ADAMW["weight_decay"]), betas=(ADAMW["beta1"], ADAMW["beta2"]),
                                  eps=ADAMW["eps"])
    losses, norms, rates = [], [], []
    for step in range(STEPS):
        losses.append(backward(network, params, tokens[step], targets[step])[0].item())
        norms.append(torch.nn.utils.clip_grad_norm_(params.values(), ADAMW["grad_clip"]).item())
        rates.append(adamw_lr(step))
        for g in optimizer.param_groups:
            g["lr"] = rates[-1]
        optimizer.step()
    out = group.create_group("adamw")
    attributes(out, ADAMW)
    put(out, "losses", losses)
    put(out, "grad_norms", norms)
    put(out, "lr", rates)
    put_all(out.create_group("params"), params, torch.float32)

    params = leaves(initial)
    optimizer = torch.optim.SGD(decay_groups(params, SGD["weight_decay"]), lr=SGD["lr"], momentum=SGD["momentum"],
                                nesterov=SGD["nesterov"])
    losses = []
    for step in range(STEPS):
        losses.append(backward(network, params, tokens[step], targets[step])[0].item())
        optimizer.step()
    out = group.create_group("sgd")
    attributes(out, SGD)
    put(out, "losses", losses)
    put_all(out.create_group("params"), params, torch.float32)


def write_op(file, name, inputs, op, results, **attrs):
    """Stores the inputs, the output (results[0]) and gradients: "dx" in results is that of input "x".

    `op` takes the f64 inputs and returns the output and the scalar to differentiate.
    """
    group = file.create_group(name)
    attributes(group, attrs)
    for key, value in inputs.items():
        put(group, key, value)
    args = {k: v.double().requires_grad_() if v.is_floating_point() else v for k, v in inputs.items()}
    y, scalar = op(args)
    scalar.backward()
    output, *grads = results
    put(group, output, y.float())
    for key in grads:
        put(group, key, args[key[1:]].grad.float())


def write_ops(file, rng):
    def weighted(y, a):
        return y, (y * a["dy"].detach()).sum()

    write_op(file, "layer_norm",
             dict(x=normal(rng, 7, 33, scale=2, shift=0.7), weight=normal(rng, 33, scale=0.5, shift=1),
                  bias=normal(rng, 33), dy=normal(rng, 7, 33)),
             lambda a: weighted(layer_norm(a["x"], a["weight"], a["bias"]), a), ["y", "dx", "dweight", "dbias"],
             eps=1e-5)
    write_op(file, "gelu", dict(x=normal(rng, 1023, scale=3), dy=normal(rng, 1023)),
             lambda a: weighted(gelu(a["x"]), a), ["y", "dx"])
    heads, size = 3, 5
    write_op(file, "attention", dict(qkv=normal(rng, 2, 33, 3 * heads * size), dy=normal(rng, 2, 33, heads * size)),
             lambda a: weighted(attention(a["qkv"], heads), a), ["y", "dqkv"], heads=heads,
             head_size=size)

    def mean_loss(a):
        loss = cross_entropy(a["logits"], a["targets"])
        return loss, loss.mean()

    logits = normal(rng, 31, 65, scale=2)
    logits[3] += 200  # exp overflows f32 unless the row's maximum is subtracted
    logits[4] -= 200
    write_op(file, "cross_entropy", dict(logits=logits, targets=torch.from_numpy(rng.integers(65, size=31))),
             mean_loss, ["loss", "dlogits"])
    tokens = torch.from_numpy(rng.integers(11, size=(3, 9)))  # 27 draws of 11: repeats in plenty
    tokens[tokens == 6] = 7  # a row that nothing refers to has gradient zero
    write_op(file, "embedding", dict(weight=normal(rng, 11, 21), tokens=tokens, dy=normal(rng, 3, 9, 21)),
             lambda a: weighted(a["weight"][a["tokens"]], a), ["y", "dweight"])


# --- networks by layers: images come and go with channels last, weights are filters x rows x columns x channels ---

def conv(x, weight, bias, **how):
    return F.conv2d(x.permute(0, 3, 1, 2), weight.permute(0, 3, 1, 2), bias, **how).permute(0, 2, 3, 1)


def pooled(pool, x, *how, **more):
    return pool(x.permute(0, 3, 1, 2), *how, **more).permute(0, 2, 3, 1)


CONVOLUTIONS = """
input = [9, 8, 3]
layers = [
    { kind = "conv2d", filters = 6, kernel = 3, padding = "same", groups = 3 },
    { kind = "relu" },
    { kind = "max_pool2d", kernel = 3, stride = 2, padding = 1 },
    { kind = "residual", layers = [
        { kind = "conv2d", filters = 8, kernel = [3, 2], stride = [2, 1], padding = [1, 0] },
        { kind = "silu" },
    ], shortcut = [{ kind = "conv2d", filters = 8, kernel = [1, 2], stride = [2, 1], bias = false }] },
    { kind = "avg_pool2d", kernel = 2, stride = 1, padding = 1 },
    { kind = "layer_norm" },
    { kind = "residual", layers = [{ kind = "dense", units = 8 }, { kind = "tanh" }] },
    { kind = "global_avg_pool" },
    { kind = "dense", units = 7 },
]
"""


def convolutions(p, x):
    x = torch.relu(conv(x, p["layers.0.weight"], p["layers.0.bias"], padding=1, groups=3))
    x = pooled(F.max_pool2d, x, 3, stride=2, padding=1)
    body = F.silu(conv(x, p["layers.3.layers.0.weight"], p["layers.3.layers.0.bias"], stride=(2, 1), padding=(1, 0)))
    x = body + conv(x, p["layers.3.shortcut.0.weight"], None, stride=(2, 1))
    x = pooled(F.avg_pool2d, x, 2, stride=1, padding=1, count_include_pad=False)
    x = layer_norm(x, p["layers.5.weight"], p["layers.5.bias"])
    x = x + torch.tanh(x @ p["layers.6.layers.0.weight"].T + p["layers.6.layers.0.bias"])
    return x.mean((1, 2)) @ p["layers.8.weight"].T + p["layers.8.bias"]


CONVOLUTION_SHAPES = {
    "layers.0.weight": (6, 3, 3, 1), "layers.0.bias": (6,), "layers.3.layers.0.weight": (8, 3, 2, 6),
    "layers.3.layers.0.bias": (8,), "layers.3.shortcut.0.weight": (8, 1, 2, 6), "layers.5.weight": (8,),
    "layers.5.bias": (8,), "layers.6.layers.0.weight": (8, 8), "layers.6.layers.0.bias": (8,),
    "layers.8.weight": (7, 8), "layers.8.bias": (7,)}

NUMBERS = """
input = [6]
layers = [
    { kind = "layer_norm", epsilon = 0.01 },
    { kind = "reshape", shape = [2, 3] },
    { kind = "dense", units = 5, bias = false },
    { kind = "gelu" },
    { kind = "flatten" },
    { kind = "dense", units = 4 },
    { kind = "sigmoid" },
    { kind = "dense", units = 3 },
]
"""


def numbers(p, x):
    x = layer_norm(x, p["layers.0.weight"], p["layers.0.bias"], eps=0.01).reshape(-1, 2, 3)
    x = gelu(x @ p["layers.2.weight"].T).reshape(-1, 10)
    x = torch.sigmoid(x @ p["layers.5.weight"].T + p["layers.5.bias"])
    return x @ p["layers.7.weight"].T + p["layers.7.bias"]


NUMBER_SHAPES = {"layers.0.weight": (6,), "layers.0.bias": (6,), "layers.2.weight": (5, 3), "layers.5.weight": (4, 10),
                 "layers.5.bias": (4,), "layers.7.weight": (3, 4), "layers.7.bias": (3,)}

IDS = """
input = [5]
layers = [
    { kind = "embedding", ids = 11, width = 6 },
    { kind = "dense", units = 4 },
    { kind = "softmax" },
    { kind = "flatten" },
    { kind = "dense", units = 2 },
]
"""


def of_ids(p, x):
    x = (p["layers.0.weight"][x] @ p["layers.1.weight"].T + p["layers.1.bias"]).softmax(-1).reshape(-1, 20)
    return x @ p["layers.4.weight"].T + p["layers.4.bias"]


IDS_SHAPES = {"layers.0.weight": (11, 6), "layers.1.weight": (4, 6), "layers.1.bias": (4,), "layers.4.weight": (2, 20),
              "layers.4.bias": (2,)}


NORMS = """
input = [5, 4, 3]
layers = [
    { kind = "conv2d", filters = 6, kernel = 3, padding = "same", bias = false },
    { kind = "batch_norm", momentum = 0.25 },
    { kind = "relu" },
    { kind = "residual", layers = [
        { kind = "conv2d", filters = 6, kernel = 3, padding = "same" },
        { kind = "group_norm", groups = 3, epsilon = 0.001 },
        { kind = "silu" },
    ], shortcut = [{ kind = "batch_norm", epsilon = 0.01 }] },
    { kind = "tanh" },
    { kind = "flatten" },
    { kind = "dense", units = 9, bias = false },
    { kind = "batch_norm", synchronised = false },
    { kind = "group_norm", groups = 1 },
    { kind = "dense", units = 7 },
]
"""


def norms(p, x, training=True):
    def batch_norm(x, name, eps=1e-5):
        flat = x.reshape(-1, x.shape[-1])
        if training:  # the gradient of running statistics is what they move to
            p[f"{name}.running_mean"].grad = flat.mean(0).detach()
            p[f"{name}.running_var"].grad = flat.var(0).detach()
        running = [p[f"{name}.running_{of}"].detach().clone() for of in ("mean", "var")]
        return F.batch_norm(flat, *running, p[f"{name}.weight"], p[f"{name}.bias"], training, eps=eps).reshape(x.shape)

    def group_norm(x, name, groups, eps=1e-5):
        if x.dim() == 2:
            return F.group_norm(x, groups, p[f"{name}.weight"], p[f"{name}.bias"], eps)
        return F.group_norm(x.permute(0, 3, 1, 2), groups, p[f"{name}.weight"], p[f"{name}.bias"], eps).permute(0, 2, 3, 1)

    x = torch.relu(batch_norm(conv(x, p["layers.0.weight"], None, padding=1), "layers.1"))
    body = conv(x, p["layers.3.layers.0.weight"], p["layers.3.layers.0.bias"], padding=1)
    x = F.silu(group_norm(body, "layers.3.layers.1", 3, 1e-3)) + batch_norm(x, "layers.3.shortcut.0", 0.01)
    x = torch.tanh(x).reshape(-1, 120) @ p["layers.6.weight"].T
    x = group_norm(batch_norm(x, "layers.7"), "layers.8", 1)
    return x @ p["layers.9.weight"].T + p["layers.9.bias"]


NORM_SHAPES = {"layers.0.weight": (6, 3, 3, 3), "layers.3.layers.0.weight": (6, 3, 3, 6), "layers.3.layers.0.bias": (6,),
               "layers.6.weight": (9, 120), "layers.9.weight": (7, 9), "layers.9.bias": (7,)}
for place, width in {"layers.1": 6, "layers.3.layers.1": 6, "layers.3.shortcut.0": 6, "layers.7": 9, "layers.8": 9}.items():
    ends = ["weight", "bias"] + ([] if place in ("layers.3.layers.1", "layers.8") else ["running_mean", "running_var"])
    NORM_SHAPES |= {f"{place}.{end}": (width,) for end in ends}


TABLES = """
input = [5]
layers = [
    { kind = "embedding_tables", ids = [7, 3, 11], width = 6, dense = [
        { kind = "dense", units = 8 },
        { kind = "silu" },
        { kind = "dense", units = 6 },
        { kind = "silu" },
    ] },
    { kind = "dot_interaction" },
    { kind = "dense", units = 9 },
    { kind = "silu" },
    { kind = "dense", units = 1 },
]
"""


def tables(p, x):
    """Naumov et al., "Deep learning recommendation model", 2019; `x` is numbers and ids."""
    x, ids = x
    for i in (0, 2):
        x = F.silu(F.linear(x, p[f"layers.0.dense.{i}.weight"], p[f"layers.0.dense.{i}.bias"]))
    rows = torch.stack([x] + [F.embedding(ids[:, i], p[f"layers.0.tables.{i}.weight"]) for i in range(3)], 1)
    products = rows @ rows.transpose(1, 2)
    x = torch.cat([x, products[:, *torch.tril_indices(4, 4, -1)]], 1)
    x = F.silu(F.linear(x, p["layers.2.weight"], p["layers.2.bias"]))
    return F.linear(x, p["layers.4.weight"], p["layers.4.bias"])


TABLE_SHAPES = {"layers.0.dense.0.weight": (8, 5), "layers.0.dense.0.bias": (8,), "layers.0.dense.2.weight": (6, 8),
                "layers.0.dense.2.bias": (6,), "layers.0.tables.0.weight": (7, 6), "layers.0.tables.1.weight": (3, 6),
                "layers.0.tables.2.weight": (11, 6), "layers.2.weight": (9, 12), "layers.2.bias": (9,),
                "layers.4.weight": (1, 9), "layers.4.bias": (1,)}


def write_layers(file, name, rng, model, shapes, network, x, target, loss, loss_config, metrics, weights=None):
    """`loss` is the mean that training makes small; `metrics` gives numbers of (output, target) by name, outside training.
    `weights` are for the test alone: `loss` knows them."""
    group = file.create_group(name)
    attributes(group, dict(model=model, loss=loss_config))
    initial = {n: normal(rng, *s, scale=0.4, shift=1.0 if "5.weight" in n and len(s) == 1 else 0.0)
               for n, s in shapes.items()}
    for n in initial:
        if n.endswith("running_var"):
            initial[n] = initial[n].abs() + 0.5
    params = leaves(initial)
    wide = (x[0].double(), x[1]) if isinstance(x, tuple) else x.double() if x.is_floating_point() else x
    output = network(params, wide)
    value = loss(output, target.double() if target.is_floating_point() else target)
    value.backward()
    if network is norms:
        output = network(params, wide, training=False)
    put_all(group.create_group("params"), initial, torch.float32)
    put_all(group.create_group("grads"), {n: p.grad for n, p in params.items()}, torch.float64)
    of_input = dict(inputs=x[0], categories=x[1]) if isinstance(x, tuple) else dict(inputs=x)
    for key, tensor in (of_input | dict(targets=target, output=output, loss=value)).items():
        put(group, key, tensor)
    if weights is not None:
        put(group, "weights", weights)
    for key, number in metrics(output.detach(), target).items():
        put(group, f"metrics/{key}", torch.as_tensor(number).double())


def write_all_layers(file):
    rng = np.random.default_rng(77)
    weights = torch.tensor([0.5, 1.0, 2.0, 1.5, 1.0, 0.25, 3.0], dtype=torch.float64)

    def classes(output, target):
        # Weighted by class, and the mean over samples: PyTorch's own mean would be over weights.
        return (F.cross_entropy(output, target, label_smoothing=0.1, reduction="none") * weights[target]).mean()

    def ranks(output, target):
        top = output.topk(5).indices
        return dict(loss=F.cross_entropy(output, target), accuracy=(top[:, 0] == target).double().mean(),
                    top5_accuracy=(top == target[:, None]).any(1).double().mean())

    write_layers(file, "convolutions", rng, CONVOLUTIONS, CONVOLUTION_SHAPES, convolutions,
                 normal(rng, 12, 9, 8, 3), torch.from_numpy(rng.integers(7, size=12)), classes,
                 "label_smoothing = 0.1\nclass_weights = [0.5, 1.0, 2.0, 1.5, 1.0, 0.25, 3.0]", ranks)

    def deviations(output, target):
        apart = output - target
        return dict(loss=F.huber_loss(output, target.double(), delta=0.8), mae=apart.abs().mean(),
                    rmse=(apart ** 2).mean().sqrt())

    write_layers(file, "numbers", rng, NUMBERS, NUMBER_SHAPES, numbers, normal(rng, 9, 6, scale=2, shift=1),
                 normal(rng, 9, 3), lambda o, t: F.huber_loss(o, t, delta=0.8), 'kind = "huber"\nhuber_delta = 0.8',
                 deviations)
    def sides(output, target):
        return dict(loss=F.binary_cross_entropy_with_logits(output, target.double()),
                    accuracy=((output > 0) == (target > 0.5)).double().mean())

    write_layers(file, "ids", rng, IDS, IDS_SHAPES, of_ids, torch.from_numpy(rng.integers(11, size=(9, 5))),
                 torch.from_numpy(rng.integers(2, size=(9, 2)).astype(np.float32)),
                 lambda o, t: F.binary_cross_entropy_with_logits(o, t), 'kind = "binary-cross-entropy"', sides)
    write_weighted(file, np.random.default_rng(79), deviations)
    write_layers(file, "norms", np.random.default_rng(78), NORMS, NORM_SHAPES, norms, normal(rng, 11, 5, 4, 3),
                 torch.from_numpy(rng.integers(7, size=11)), F.cross_entropy, "", ranks)
    own = np.random.default_rng(79)
    ids = torch.from_numpy(np.stack([own.integers(rows, size=13) for rows in (7, 3, 11)], 1))
    write_layers(file, "tables", own, TABLES, TABLE_SHAPES, tables, (normal(own, 13, 5), ids),
                 torch.from_numpy(own.integers(2, size=(13, 1)).astype(np.float32)),
                 lambda o, t: F.binary_cross_entropy_with_logits(o, t), 'kind = "binary-cross-entropy"', sides)


def write_weighted(file, rng, deviations):
    """A weight for each sample, one of them 0, beside those of classes. Means are over samples, as Keras takes them."""
    of_classes = torch.tensor([0.5, 2.0, 1.25], dtype=torch.float64)
    weights = normal(rng, 9).abs() * 2
    weights[3] = 0

    def classes(output, target):
        losses = F.cross_entropy(output, target, label_smoothing=0.1, reduction="none")
        return (losses * of_classes[target] * weights.double()).mean()

    def likeliest(output, target):
        return dict(loss=F.cross_entropy(output, target), accuracy=(output.argmax(1) == target).double().mean())

    write_layers(file, "weighted_classes", rng, NUMBERS, NUMBER_SHAPES, numbers, normal(rng, 9, 6, scale=2, shift=1),
                 torch.from_numpy(rng.integers(3, size=9)), classes,
                 "label_smoothing = 0.1\nclass_weights = [0.5, 2.0, 1.25]", likeliest, weights)
    write_layers(file, "weighted_numbers", rng, NUMBERS, NUMBER_SHAPES, numbers, normal(rng, 9, 6, scale=2, shift=1),
                 normal(rng, 9, 3),
                 lambda o, t: (F.huber_loss(o, t, delta=0.8, reduction="none").mean(1) * weights.double()).mean(),
                 'kind = "huber"\nhuber_delta = 0.8', deviations, weights)


# --- optimizers, on a vector and random gradients ---

class Lion(torch.optim.Optimizer):
    """Chen et al., "Symbolic discovery of optimization algorithms", 2023, algorithm 2."""

    def __init__(self, params, lr, betas, weight_decay):
        super().__init__(params, dict(lr=lr, betas=betas, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                beta1, beta2 = group["betas"]
                way = torch.sign(beta1 * m + (1 - beta1) * p.grad)
                p -= group["lr"] * (way + group["weight_decay"] * p)
                m.copy_(beta2 * m + (1 - beta2) * p.grad)


class Lamb(torch.optim.Optimizer):
    """You et al., "Large batch optimization for deep learning", 2020, algorithm 2, the norms as they are."""

    def __init__(self, params, lr, betas, eps, weight_decay):
        super().__init__(params, dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["step"] = state.get("step", 0) + 1
                means = [state.setdefault(name, torch.zeros_like(p)) for name in ("m", "v")]
                hats = []
                for mean, beta, power in zip(means, group["betas"], (1, 2)):
                    mean.copy_(beta * mean + (1 - beta) * p.grad ** power)
                    hats.append(mean / (1 - beta ** state["step"]))
                way = hats[0] / (hats[1].sqrt() + group["eps"]) + group["weight_decay"] * p
                p -= group["lr"] * p.norm() / way.norm() * way


class Lars(torch.optim.SGD):
    """You, Gitman and Ginsburg, "Large batch training of convolutional networks", 2017; the learning rate outside the momentum."""

    def __init__(self, params, trust, weight_decay, **how):
        super().__init__(params, **how)
        self.trust, self.decay = trust, weight_decay

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                rate = self.trust * p.norm() / (p.grad.norm() + self.decay * p.norm())
                p.grad = rate * (p.grad + self.decay * p)
        super().step()


OPTIMIZERS = {
    "adam": (torch.optim.Adam, dict(betas=(0.9, 0.95), eps=1e-8)),
    "adagrad": (torch.optim.Adagrad, dict(eps=1e-8)),
    "rmsprop": (torch.optim.RMSprop, dict(alpha=0.95, eps=1e-8, momentum=0.8)),
    "lion": (Lion, dict(betas=(0.9, 0.95))),
    "lamb": (Lamb, dict(betas=(0.9, 0.95), eps=1e-8)),
    "lars": (Lars, dict(momentum=0.8, nesterov=True, trust=0.05))}


def write_optimizers(file, rng):
    """Ten updates of 500 elements by every optimizer, learning rate 0.01 / step, weight decay 0.1."""
    initial, grads = normal(rng, 500), normal(rng, STEPS, 500)
    put(file, "initial", initial)
    put(file, "grads", grads)
    for name, (kind, how) in OPTIMIZERS.items():
        p = initial.double().clone().requires_grad_()
        optimizer = kind([p], lr=0.01, weight_decay=0.1, **how)
        for step in range(STEPS):
            optimizer.param_groups[0]["lr"] = 0.01 / (step + 1)
            p.grad = grads[step].double()
            optimizer.step()
        put(file, name, p)


def main():
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    with h5py.File(HERE / "gpt.h5", "w") as file:
        file.attrs["torch"] = np.bytes_(torch.__version__)
        for seed, name in enumerate(["bias", "nobias"]):
            rng = np.random.default_rng(1234 + seed)
            write_case(file.create_group(name), rng, CONFIG, shapes(bias=name == "bias", **CONFIG), gpt)
    with h5py.File(HERE / "llama.h5", "w") as file:
        file.attrs["torch"] = np.bytes_(torch.__version__)
        for seed, (name, case) in enumerate(LLAMA_CASES.items()):
            config = LLAMA | case
            network = functools.partial(llama, **config)
            write_case(file.create_group(name), np.random.default_rng(4321 + seed), config, llama_shapes(**config), network)
    with h5py.File(HERE / "layers.h5", "w") as file:
        file.attrs["torch"] = np.bytes_(torch.__version__)
        write_all_layers(file)
    with h5py.File(HERE / "optimizers.h5", "w") as file:
        file.attrs["torch"] = np.bytes_(torch.__version__)
        write_optimizers(file, np.random.default_rng(55))
    with h5py.File(HERE / "ops.h5", "w") as file:
        file.attrs["torch"] = np.bytes_(torch.__version__)
        write_ops(file, np.random.default_rng(99))


if __name__ == "__main__":
    main()
