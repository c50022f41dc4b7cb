"""Writes hf-llama-tiny/ next to this file: a small Llama as Hugging Face saves it, and its logits (see README.md)."""

import json
import pathlib

import torch
from transformers import LlamaConfig, LlamaForCausalLM

HERE = pathlib.Path(__file__).parent / "hf-llama-tiny"
BATCH = 3

torch.manual_seed(6)
torch.set_num_threads(1)
config = LlamaConfig(vocab_size=41, max_position_embeddings=12, hidden_size=24, intermediate_size=40, num_hidden_layers=2,
                     num_attention_heads=4, num_key_value_heads=2, rms_norm_eps=1e-5,
                     rope_parameters={"rope_type": "default", "rope_theta": 500.0}, bos_token_id=None, eos_token_id=None)
model = LlamaForCausalLM(config).eval()
with torch.no_grad():
    for name, parameter in model.named_parameters():
        # Larger than the usual initial values, and no ones, so that every tensor shows in the logits.
        parameter.copy_(0.15 * torch.randn(parameter.shape) + (1.0 if "norm" in name else 0.0))
    model.save_pretrained(HERE)
    tokens = torch.randint(config.vocab_size, (BATCH, config.max_position_embeddings))
    logits = model.double()(tokens).logits

(HERE / "generation_config.json").unlink(missing_ok=True)
(HERE / "logits.json").write_text(json.dumps({"tokens": tokens.tolist(), "logits": logits.tolist()}) + "\n")
