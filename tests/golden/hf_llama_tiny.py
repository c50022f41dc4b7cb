"""Writes hf-llama-tiny/, hf-llama3-tiny/ and hf-llama-linear-tiny/ next to this file: small Llamas as Hugging Face saves them, and
their logits (see README.md)."""

import json
import pathlib

import torch
from transformers import LlamaConfig, LlamaForCausalLM

HERE = pathlib.Path(__file__).parent
BATCH = 3
SIZE = dict(vocab_size=41, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            rms_norm_eps=1e-5, bos_token_id=None, eos_token_id=None)
SCALED = dict(max_position_embeddings=48, hidden_size=32)
LLAMA3 = dict(rope_type="llama3", rope_theta=500.0, factor=4.0, low_freq_factor=0.25, high_freq_factor=2.0,
              original_max_position_embeddings=16)
CASES = {
    "hf-llama-tiny": dict(max_position_embeddings=12, hidden_size=24,
                          rope_parameters={"rope_type": "default", "rope_theta": 500.0}),
    "hf-llama3-tiny": dict(rope_parameters=LLAMA3, **SCALED),
    "hf-llama-linear-tiny": dict(rope_parameters={"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0}, **SCALED),
}

torch.set_num_threads(1)
for name, case in CASES.items():
    torch.manual_seed(6)
    config = LlamaConfig(**SIZE, **case)
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for tensor, parameter in model.named_parameters():
            # Larger than the usual initial values, and no ones, so that every tensor shows in the logits.
            parameter.copy_(0.15 * torch.randn(parameter.shape) + (1.0 if "norm" in tensor else 0.0))
        model.save_pretrained(HERE / name)
        tokens = torch.randint(config.vocab_size, (BATCH, config.max_position_embeddings))
        logits = model.double()(tokens).logits

    (HERE / name / "generation_config.json").unlink(missing_ok=True)
    (HERE / name / "logits.json").write_text(json.dumps({"tokens": tokens.tolist(), "logits": logits.tolist()}) + "\n")
