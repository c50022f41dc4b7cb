"""Writes hf-gpt2-tiny/ next to this file: a small GPT-2 as Hugging Face saves it, and its logits (see README.md)."""

import json
import pathlib

import torch
from transformers import GPT2Config, GPT2LMHeadModel

HERE = pathlib.Path(__file__).parent / "hf-gpt2-tiny"
BATCH = 3

torch.manual_seed(5)
torch.set_num_threads(1)
config = GPT2Config(vocab_size=41, n_positions=12, n_embd=24, n_layer=2, n_head=3, bos_token_id=None, eos_token_id=None)
model = GPT2LMHeadModel(config).eval()
with torch.no_grad():
    for name, parameter in model.named_parameters():
        # Larger than GPT-2's own initial values, and no zeros or ones, so that every tensor shows in the logits.
        parameter.copy_(0.15 * torch.randn(parameter.shape) + (1.0 if "ln_" in name and name.endswith("weight") else 0.0))
    model.save_pretrained(HERE)
    tokens = torch.randint(config.vocab_size, (BATCH, config.n_positions))
    logits = model.double()(tokens).logits

(HERE / "generation_config.json").unlink(missing_ok=True)
(HERE / "logits.json").write_text(json.dumps({"tokens": tokens.tolist(), "logits": logits.tolist()}) + "\n")
