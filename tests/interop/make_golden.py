#!/usr/bin/env python3
"""Makes tests/data/huggingface/: small random models as transformers saves them, with their logits, and the
frequencies of its rotary positions.

    make_golden.py FOLDER

Each is shaped like a model that people import, with its kind of attention, and is stored in bfloat16, as most
are. FOLDER/NAME/ holds config.json, model.safetensors and reference.safetensors (`tokens` [T] int32, `logits`
[T, V] float32, computed in float32). FOLDER/rotary.json is a list of models with head_dim and the configuration
that they have, the frequencies of one head (float32) and the factor of queries and keys. Needs transformers and
safetensors.
"""
import json
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


# Models of today whose heads are not hidden_size / num_attention_heads wide, and stretched positions.
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 1000000.0, "factor": 4.0}
MODELS.update(
    llama3_2=transformers.LlamaConfig(
        **SHAPE,
        rope_parameters={**LLAMA3, "original_max_position_embeddings": 16},
        head_dim=16,
        num_key_value_heads=1,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    ),
    qwen3=transformers.Qwen3Config(
        **SHAPE, **rope(1000000.0), head_dim=16, num_key_value_heads=2, rms_norm_eps=1e-6, tie_word_embeddings=True
    ),
    qwen_yarn=transformers.Qwen2Config(
        **SHAPE,
        rope_parameters={**YARN, "original_max_position_embeddings": 16},
        num_key_value_heads=2,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
    ),
    mistral=transformers.MistralConfig(
        **SHAPE,
        **rope(1000000.0),
        head_dim=6,
        num_key_value_heads=2,
        rms_norm_eps=1e-5,
        sliding_window=8,
        tie_word_embeddings=False,
    ),
)


# The layouts of GPT-2, Pythia and OLMo 2.
GPT2_SHAPE = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 96, "bos_token_id": 1, "eos_token_id": 2}
NEOX = {**SHAPE, "tie_word_embeddings": False}
NEOX_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
MODELS.update(
    gpt2=transformers.GPT2Config(**GPT2_SHAPE, tie_word_embeddings=True),
    gpt2_untied=transformers.GPT2Config(
        **GPT2_SHAPE,
        n_inner=56,
        activation_function="gelu",
        layer_norm_epsilon=1e-3,
        scale_attn_weights=False,
        tie_word_embeddings=False,
    ),
    pythia=transformers.GPTNeoXConfig(**NEOX, rope_parameters={**NEOX_ROPE, "partial_rotary_factor": 0.25}),
    gpt_neox=transformers.GPTNeoXConfig(
        **NEOX,
        rope_parameters={**NEOX_ROPE, "rope_theta": 700.0, "partial_rotary_factor": 1.0},
        hidden_act="gelu_fast",
        use_parallel_residual=False,
        attention_bias=False,
    ),
    neox_dynamic=transformers.GPTNeoXConfig(
        **{**NEOX, "max_position_embeddings": 10},
        rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0, "partial_rotary_factor": 0.5},
    ),
    olmo2=transformers.Olmo2Config(
        **SHAPE, **rope(500000.0), num_key_value_heads=4, rms_norm_eps=1e-6, tie_word_embeddings=False
    ),
    olmo2_grouped=transformers.Olmo2Config(
        **SHAPE, **rope(10000.0), num_key_value_heads=2, rms_norm_eps=1e-5, attention_bias=True, tie_word_embeddings=True
    ),
)


# name: (head_dim, longest text, length of the text, rope_parameters)
ROTARY = {
    "Llama 2": (128, 4096, 4096, {"rope_type": "default", "rope_theta": 10000.0}),
    "Llama 3.1": (128, 131072, 131072, {**LLAMA3, "factor": 8.0, "original_max_position_embeddings": 8192}),
    "Llama 3.2": (64, 131072, 131072, {**LLAMA3, "original_max_position_embeddings": 8192}),
    "Qwen2.5 and 3": (128, 131072, 131072, {**YARN, "original_max_position_embeddings": 32768}),
    "yarn with its bounds": (
        64,
        4096,
        4096,
        {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 40.0,
            "beta_fast": 24.0,
            "beta_slow": 2.5,
            "mscale": 0.7,
            "mscale_all_dim": 1.3,
            "original_max_position_embeddings": 2048,
        },
    ),
    "yarn with its factor": (
        96, 4096, 4096, {**YARN, "attention_factor": 0.9, "factor": 2.5, "original_max_position_embeddings": 4096}
    ),
    "linear": (128, 4096, 4096, {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}),
    "dynamic, short": (64, 2048, 1500, {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}),
    "dynamic, long": (64, 2048, 5000, {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}),
}


def rotary():
    cases = []
    for name, (head_dim, longest, length, parameters) in ROTARY.items():
        shape = {**SHAPE, "hidden_size": 2 * head_dim, "num_attention_heads": 2, "max_position_embeddings": longest}
        config = transformers.LlamaConfig(**shape, rope_parameters=dict(parameters))
        kind = parameters["rope_type"]
        if kind == "default":
            embedding = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding
            frequencies, factor = embedding.compute_default_rope_parameters(config)
        else:
            compute = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS[kind]
            frequencies, factor = compute(config, "cpu", seq_len=length)
        kept = {key: shape[key] for key in shape if key.endswith(("_size", "heads", "layers", "embeddings"))}
        kept.update(model_type="llama", rope_parameters=parameters)
        cases.append(
            {"name": name, "length": length, "config": kept, "factor": factor, "frequencies": frequencies.tolist()}
        )
    return cases


def main():
    root = pathlib.Path(sys.argv[1])
    (root / "rotary.json").write_text(json.dumps(rotary(), indent=1) + "\n")
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
