#!/usr/bin/env python3
"""Makes tests/data/huggingface/: small random models as transformers saves them, with their logits.

    make_golden.py FOLDER

Each is shaped like a model that people import, with its kind of attention, and is stored in bfloat16, as most
are. FOLDER/NAME/ holds config.json, model.safetensors and reference.safetensors (`tokens` [T] int32, `logits`
[T, V] float32, computed in float32). Needs transformers and safetensors.
"""
import pathlib
import sys

import torch
import transformers
from safetensors.torch import save_file

SHAPE = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}


def rope(theta):
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta}}


MODELS = {
    "llama3": transformers.LlamaConfig(
        **SHAPE, **rope(500000.0), num_key_value_heads=1, rms_norm_eps=1e-5, tie_word_embeddings=False
    ),
    "smollm2": transformers.LlamaConfig(
        **SHAPE, **rope(100000.0), num_key_value_heads=2, rms_norm_eps=1e-5, tie_word_embeddings=True
    ),
    "qwen2_5": transformers.Qwen2Config(
        **SHAPE, **rope(1000000.0), num_key_value_heads=2, rms_norm_eps=1e-6, tie_word_embeddings=True
    ),
}


def main():
    root = pathlib.Path(sys.argv[1])
    for number, (name, config) in enumerate(MODELS.items()):
        torch.manual_seed(number)
        config.dtype = "bfloat16"
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():  # norms and biases are not to be constants
                parameter.add_(0.2 * torch.randn_like(parameter))
        model.to(torch.bfloat16).save_pretrained(root / name)
        (root / name / "generation_config.json").unlink(missing_ok=True)
        tokens = torch.randint(SHAPE["vocab_size"], (16,))
        # Loaded anew: the conversion to bfloat16 has rounded the rotary frequencies too.
        model = transformers.AutoModelForCausalLM.from_pretrained(root / name, dtype=torch.float32)
        with torch.no_grad():
            logits = model.eval()(input_ids=tokens[None]).logits[0]
        reference = {"tokens": tokens.to(torch.int32), "logits": logits.contiguous()}
        save_file(reference, root / name / "reference.safetensors")


if __name__ == "__main__":
    main()
