#!/usr/bin/env python3
"""Models out and in again: sbtrain train, export, transformers, import, export.

    round_trip_test.py SBTRAIN

Small models of every kind are trained for some steps. The exported folder must give the logits that
modeling_sbtrain.py computes from the checkpoint's own tensors (which modeling_test.py compares with the
formulas), generate() must write what these logits say, and the imported checkpoint must hold the same bits. The
options --verify, --dtype and --shard-gb, continued pretraining with --init-from, and damaged folders are tried
as well.

Without transformers, only the models that come with their own code are computed. Exit status: 0 good, 1 not
good, 77 PyTorch is not installed.
"""
import base64
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "src/export/python"), str(ROOT / "tests/interop")]
sys.dont_write_bytecode = True
os.environ["HF_HUB_OFFLINE"] = "1"
try:
    import torch
except ImportError as error:
    print(f"skipped: {error} (install python3-torch)")
    sys.exit(77)
try:
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
except ImportError:
    transformers = None
from modeling_sbtrain import SbtrainPlain  # noqa: E402
from verify_logits import read_safetensors, read_weights  # noqa: E402

TOLERANCE = 1e-4
VOCAB = 64
LENGTH = 32
BASE = {"layers": 2, "width": 32, "inner": 44, "heads": 4, "vocab": VOCAB, "init_std": 0.2}
STICK = {"type": "stickbreaking"}
ROPE = {"type": "softmax", "position": "rope", "rope_base": 700}
LLAMA3 = {
    "rope_scaling": "llama3", "rope_factor": 8, "rope_train_length": 60, "rope_low_freq_factor": 1, "rope_high_freq_factor": 3
}
YARN = {"rope_scaling": "yarn", "rope_factor": 4, "rope_train_length": 40, "rope_beta_fast": 4, "rope_beta_slow": 0.5}
JOINT = {"qk_norm": True, "qk_norm_scope": "joint"}
BIASES = {"qkv_bias": True, "output_bias": True}
NEOX = {"norm": "layernorm", "mlp": "gelu", "parallel_residual": True}
GPT2 = {"type": "softmax", "position": "none", **BIASES}
LEARNED = {"norm": "layernorm", "position": "learned", "max_positions": 40}
MULTIPLIERS = {"embedding_multiplier": 3, "residual_multiplier": 0.22, "logits_multiplier": 0.7}

# name: (architecture, model, same bits after import)
CASES = {
    "llama": ("Llama", {"attention": ROPE, "tied": False}, True),
    "llama_biases": ("Llama", {"attention": {**ROPE, "qkv_bias": True, "output_bias": True}}, True),
    "llama_gqa": ("Llama", {"attention": ROPE, "kv_heads": 2}, True),
    "llama_linear": ("Llama", {"attention": {**ROPE, "rope_scaling": "linear", "rope_factor": 2}}, True),
    "llama_ntk": ("Llama", {"attention": {**ROPE, "rope_scaling": "ntk", "rope_factor": 2}}, True),
    "llama_dynamic": (
        "Llama",
        {"attention": {**ROPE, "rope_scaling": "dynamic_ntk", "rope_factor": 2, "rope_train_length": 20}},
        True,
    ),
    "llama_llama3": ("Llama", {"attention": {**ROPE, **LLAMA3}, "kv_heads": 2}, True),
    "llama_yarn": ("Llama", {"attention": {**ROPE, **YARN}, "head_dim": 24}, True),
    "granite_broad": ("Granite", {"attention": {**ROPE, "logit_scale": 0.5}, "head_dim": 16, **MULTIPLIERS}, True),
    "mistral_broad": ("Mistral", {"attention": {**ROPE, "window": 5}, "kv_heads": 2, "head_dim": 12}, True),
    "qwen2_yarn": ("Qwen2", {"attention": {**ROPE, **YARN, "qkv_bias": True, "rope_attention_factor": 0.8}}, True),
    "qwen2_narrow": ("Qwen2", {"attention": {**ROPE, "qkv_bias": True}, "kv_heads": 2, "head_dim": 4}, True),
    "qwen3_broad": ("Qwen3", {"attention": {**ROPE, **YARN, "qk_norm": True}, "kv_heads": 2, "head_dim": 16}, True),
    "smollm3_broad": ("SmolLM3", {"attention": [ROPE, {"type": "softmax", "position": "none"}], "head_dim": 16}, True),
    "stickbreaking_broad": ("Sbtrain", {"attention": {**STICK, "head_norm": True}, "kv_heads": 2, "head_dim": 16}, True),
    "coca_yarn": ("Sbtrain", {"attention": {"type": "coca", **YARN}, "head_dim": 6}, True),
    "based_broad": ("Sbtrain", {"attention": {"type": "based", "feature_dim": 4}, "head_dim": 16}, True),
    "granite": ("Granite", {"attention": {**ROPE, "logit_scale": 0.5}, "kv_heads": 1, **MULTIPLIERS}, True),
    "mistral": ("Mistral", {"attention": {**ROPE, "window": 5}, "kv_heads": 2}, True),
    "mistral_folded": ("Mistral", {"attention": {**ROPE, "window": 5, "logit_scale": 0.5}, **MULTIPLIERS}, False),
    "qwen2": ("Qwen2", {"attention": {**ROPE, "qkv_bias": True}, "kv_heads": 2}, True),
    "qwen3": ("Qwen3", {"attention": {**ROPE, "qk_norm": True}, "kv_heads": 2}, True),
    "qwen3_folded": (
        "Qwen3", {"attention": {**ROPE, "qk_norm": True, "logit_scale": 0.5}, "tied": False, **MULTIPLIERS}, False
    ),
    "smollm3": ("SmolLM3", {"attention": {"type": "softmax", "position": "none"}, "kv_heads": 2}, True),
    "smollm3_mixed": ("SmolLM3", {"attention": [ROPE, {"type": "softmax", "position": "none"}]}, True),
    "stickbreaking": ("Sbtrain", {"attention": STICK}, True),
    "stickbreaking_qwen": (
        "Sbtrain", {"attention": {**STICK, "qk_norm": True, "qkv_bias": True}, "kv_heads": 2}, True
    ),
    "stickbreaking_all": (
        "Sbtrain",
        {
            "attention": {
                **STICK,
                "attend_current": True,
                "remainder": "bias",
                "forget_gate": True,
                "head_norm": True,
                "logit_scale": 0.3,
                "output_bias": True,
            },
            "tied": False,
        },
        True,
    ),
    "stickbreaking_value": ("Sbtrain", {"attention": {**STICK, "remainder": "value"}, "kv_heads": 2, **MULTIPLIERS}, True),
    "alibi": ("Sbtrain", {"attention": {"type": "softmax", "position": "alibi", "window": 9}}, True),
    "fire": ("Sbtrain", {"attention": {"type": "softmax", "position": "fire"}}, True),
    "fire_shared": ("Sbtrain", {"attention": {"type": "softmax", "position": "fire", "shared": True}}, True),
    "fire_biases": (
        "Sbtrain",
        {
            "attention": {
                "type": "softmax", "position": "fire", "qkv_bias": True, "output_bias": True, "qk_norm": True, "logit_scale": 0.3
            },
            "kv_heads": 2,
        },
        True,
    ),
    "alibi_biases": (
        "Sbtrain",
        {"attention": {"type": "softmax", "position": "alibi", "qkv_bias": True, "output_bias": True, "qk_norm": True}},
        True,
    ),
    "coca": ("Sbtrain", {"attention": {"type": "coca", "qk_norm": True, "qkv_bias": True}, "kv_heads": 2}, True),
    "coca_strict": ("Sbtrain", {"attention": {"type": "coca", "variant": "strict"}}, True),
    "coca_linear": (
        "Sbtrain", {"attention": {"type": "coca", "rope_scaling": "linear", "rope_factor": 2, "output_bias": True}}, True
    ),
    "coca_dynamic": (
        "Sbtrain",
        {"attention": {"type": "coca", "rope_scaling": "dynamic_ntk", "rope_factor": 2, "rope_train_length": 20}},
        True,
    ),
    "coca_llama3": ("Sbtrain", {"attention": {"type": "coca", **LLAMA3, "output_bias": True, "logit_scale": 0.3}}, True),
    "based": (
        "Sbtrain",
        {"attention": [{"type": "short_conv"}, {"type": "based", "feature_dim": 4}], "mlp": "none", "norm": "layernorm"},
        True,
    ),
    "rebased": ("Sbtrain", {"attention": {"type": "rebased", "feature_dim": 4, "qkv_bias": True}}, True),
    "based_options": (
        "Sbtrain",
        {"attention": {"type": "based", "feature_dim": 4, "logit_scale": 0.3, "qkv_bias": True, "output_bias": True}},
        True,
    ),
    "rebased_options": (
        "Sbtrain",
        {"attention": {"type": "rebased", "feature_dim": 4, "logit_scale": 0.3, "output_bias": True}},
        True,
    ),
    "olmo2": ("Olmo2", {"attention": {**ROPE, **JOINT}, "norm_position": "output"}, True),
    "olmo2_broad": (
        "Olmo2",
        {
            "attention": {**ROPE, **JOINT, **LLAMA3, "qkv_bias": True, "output_bias": True},
            "norm_position": "output",
            "kv_heads": 2,
            "head_dim": 16,
            "tied": False,
        },
        True,
    ),
    "olmo2_folded": (
        "Olmo2",
        {
            "attention": {**ROPE, **JOINT, "logit_scale": 0.5},
            "norm_position": "output",
            "embedding_multiplier": 3,
            "logits_multiplier": 0.7,
        },
        False,
    ),
    "neox": ("GPTNeoX", {"attention": {**ROPE, **BIASES, "rope_fraction": 0.5}, **NEOX, "tied": False}, True),
    "neox_tied": ("GPTNeoX", {"attention": {**ROPE, "rope_fraction": 0.25}, **NEOX, "heads": 2, "norm_eps": 1e-3}, True),
    "neox_sequential": (
        "GPTNeoX",
        {
            "attention": {
                **ROPE, **BIASES, "rope_fraction": 0.5, "rope_scaling": "linear", "rope_factor": 2
            },
            **NEOX,
            "mlp": "gelu_tanh",
            "parallel_residual": False,
            "tied": False,
            "inner": 45,
        },
        True,
    ),
    "neox_dynamic": (
        "GPTNeoX",
        {
            "attention": {
                **ROPE, **BIASES, "rope_fraction": 0.5, "rope_scaling": "dynamic_ntk", "rope_factor": 2, "rope_train_length": 20
            },
            **NEOX,
            "tied": False,
        },
        True,
    ),
    "gpt2": ("GPT2LMHeadModel", {"attention": GPT2, **LEARNED, "mlp": "gelu_tanh"}, True),
    "gpt2_exact": (
        "GPT2LMHeadModel",
        {"attention": {**GPT2, "logit_scale": 1}, **LEARNED, "mlp": "gelu", "tied": False, "inner": 45, "norm_eps": 1e-3},
        True,
    ),
    # Not quite of a family.
    "olmo2_parallel": (
        "Sbtrain", {"attention": {**ROPE, **JOINT}, "norm_position": "output", "parallel_residual": True}, True
    ),
    "joint_norms": (
        "Sbtrain",
        {
            "attention": [{**STICK, **JOINT, "remainder": "bias"}, {"type": "coca", **JOINT}],
            "norm_position": "output",
            "kv_heads": 2,
        },
        True,
    ),
    "partial_rope": (
        "Sbtrain", {"attention": {**ROPE, "rope_fraction": 0.5}, "parallel_residual": True, "residual_multiplier": 0.5}, True
    ),
    "neox_groups": ("Sbtrain", {"attention": {**ROPE, **BIASES}, **NEOX, "kv_heads": 2}, True),
    "gpt2_stickbreaking": ("Sbtrain", {"attention": STICK, **LEARNED, "mlp": "gelu_tanh", "parallel_residual": True}, True),
    "learned": (
        "Sbtrain",
        {"attention": STICK, "position": "learned", "max_positions": 40, "mlp": "gelu", "norm": "layernorm"},
        True,
    ),
    "mixed": ("Sbtrain", {"attention": [ROPE, STICK], "inner": 45}, True),
}


class Failed(Exception):
    pass


def expect(condition, message):
    if not condition:
        raise Failed(message)


class Runs:
    def __init__(self, program, folder):
        self.program, self.folder = program, pathlib.Path(folder)
        self.environment = {**os.environ, "OMP_WAIT_POLICY": "passive", "SBTRAIN_PYTHON": sys.executable}

    def run(self, *arguments, code=0):
        words = [self.program, *map(str, arguments)]
        done = subprocess.run(words, capture_output=True, text=True, errors="replace", env=self.environment, timeout=300)
        output = done.stdout + done.stderr
        expect(done.returncode == code, f"{' '.join(words)}: exit code {done.returncode}, not {code}\n{output}")
        return output

    def path(self, name):
        return self.folder / name

    def train(self, name, model, *arguments, code=0):
        """Trains for three steps and returns the run folder."""
        config = {
            "name": name,
            "device": "cpu",
            "model": {**BASE, **model},
            "train": {"sequence_length": LENGTH, "micro_batch": 2, "batch": 4, "lr": 0.03},
            "data": {"task": {"type": "mqar", "pairs": 4, "examples": 64, "eval_examples": 4}},
            "stages": [{"name": "a", "length": "3 steps"}],
            "metrics": {"progress": False, "tensorboard": False},
        }
        file = self.path(name + ".yaml")
        file.write_text(json.dumps(config))
        folder = self.path(name)
        output = self.run("train", "--config", file, "--out", folder, *arguments, code=code)
        return folder if code == 0 else output


def weights_of(run):
    """The model's tensors in the newest checkpoint."""
    step = (run / "checkpoints/latest").read_text().strip()
    (file,) = (run / "checkpoints" / step).glob("rank-*.safetensors")
    return {k[6:]: v for k, v in read_safetensors(file).items() if k.startswith("model/")}


def plain(model, weights):
    module = SbtrainPlain({**BASE, **model})
    module.load_state_dict(weights)
    return module.eval()


def load(folder):
    """The folder's model as transformers has it; where it is missing, of our own code alone."""
    if transformers is not None:
        model, problems = transformers.AutoModelForCausalLM.from_pretrained(
            folder, trust_remote_code=True, dtype=torch.float32, output_loading_info=True
        )
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            expect(not problems.get(kind), f"{kind}: {problems.get(kind)}")
        model.eval()
        return model, lambda tokens: model(input_ids=tokens[None]).logits[0]
    config = json.loads((folder / "config.json").read_text())
    if config["model_type"] != "sbtrain":
        return None, None
    module = SbtrainPlain(config["sbtrain"])
    module.load_state_dict(read_weights(str(folder)))
    module.eval()
    return None, lambda tokens: module(tokens[None])[0]


def difference(a, b):
    return float((a - b).abs().max() / b.abs().max().clamp(min=1.0))


def check_generation(model, oracle, prompt):
    """Greedy generation with the cache, in a batch padded on the left, writes what full passes say."""
    short = prompt[3:]
    ids = torch.stack([prompt, torch.cat([torch.zeros(3, dtype=torch.long), short])])
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    written = model.generate(
        input_ids=ids, attention_mask=mask, max_new_tokens=6, do_sample=False, pad_token_id=0, eos_token_id=None
    )
    for row, tokens in ((0, prompt), (1, short)):
        for _ in range(6):
            tokens = torch.cat([tokens, oracle(tokens[None])[0, -1].argmax()[None]])
        expect(torch.equal(written[row, -6:], tokens[-6:]), f"generate() wrote {written[row, -6:]}, not {tokens[-6:]}")


def same_bits(a, b):
    return set(a) == set(b) and all(a[k].shape == b[k].shape and torch.equal(a[k], b[k]) for k in a)


def check_case(runs, name):
    architecture, model, exact = CASES[name]
    run = runs.train(name, model)
    folder = runs.path(name + "_hf")
    output = runs.run("export", "--checkpoint", run, "--output", folder)
    expect((architecture if "Model" in architecture else f"{architecture}ForCausalLM") in output, output)
    weights = weights_of(run)
    oracle = plain(model, weights)
    torch.manual_seed(1)
    tokens = torch.randint(VOCAB, (LENGTH,))
    with torch.no_grad():
        module, logits = load(folder)
        if logits is not None:
            error = difference(logits(tokens), oracle(tokens[None])[0])
            expect(error <= TOLERANCE, f"the logits differ by {error:.2e}")
        if module is not None:
            check_generation(module, oracle, tokens[:12])
    back = runs.path(name + "_back")
    runs.run("import", "--input", folder, "--output", back)
    runs.run("ckpt", "verify", back)
    imported = weights_of(back)
    expect(not exact or same_bits(imported, weights), "the imported checkpoint has other bits")
    again = runs.path(name + "_again")
    runs.run("export", "--checkpoint", back, "--output", again)
    expect(same_bits(read_weights(str(again)), read_weights(str(folder))), "the second export has other bits")
    if transformers is None and architecture != "Sbtrain":
        return "exported and imported; without transformers the logits were not compared"
    return "equal"


def check_families(runs):
    """Models as transformers makes them: the program's logits are its own within 1e-5, and all tensors come back."""
    if transformers is None:
        return "not run: transformers is not installed; the models of tests/data/huggingface stand for it in unit_export"
    try:
        import make_golden
    except ImportError as error:
        return f"not run: {error}"
    largest_error = 0.0
    for number, (name, config) in enumerate(make_golden.MODELS.items()):
        torch.manual_seed(100 + number)
        config.dtype = "float32"
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():  # norms and biases are not to be constants
                parameter.add_(0.2 * torch.randn_like(parameter))
        source, run, again = (runs.path(f"{name}_{part}") for part in ("source", "imported", "exported"))
        model.save_pretrained(source)
        runs.run("import", "--input", source, "--output", run)
        output = runs.run("export", "--checkpoint", run, "--output", again, "--verify")
        expect(type(model).__name__ in output, output)
        found = re.search(r"differ by at most (\S+), within .*; the largest is (\S+)", output)
        error = float(found[1]) / max(float(found[2]), 1.0)
        expect(error <= 1e-5, f"{name}: {output}")
        largest_error = max(largest_error, error)
        expect(same_bits(read_weights(str(again)), read_weights(str(source))), f"{name}: other bits came back")
    return f"logits within {largest_error:.1e}, equal bits"


def check_options(runs):
    """--verify of both kinds, shards, types, and the folders that are refused."""
    run = runs.path("stickbreaking")
    for name, dtype in (("stickbreaking", "f32"), ("stickbreaking", "bf16"), ("granite", "f16")):
        if transformers is None and name != "stickbreaking":
            continue
        folder = runs.path(f"verified_{name}_{dtype}")
        output = runs.run(
            "export", "--checkpoint", runs.path(name), "--output", folder, "--dtype", dtype, "--verify", "--shard-gb", 2e-5
        )
        expect("verified: " in output and "within" in output, output)
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        expect(len(set(index["weight_map"].values())) > 1, "one shard")
        weights, stored = weights_of(runs.path(name)), read_weights(str(folder))
        kind = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}[dtype]
        expect(same_bits(stored, {k: v.to(kind) for k, v in weights.items()}), f"{dtype}: other bits")
    runs.run("export", "--checkpoint", run, "--output", run / "inside", code=2)
    runs.run("export", "--checkpoint", run, "--output", runs.path("stickbreaking_hf"), code=2)
    expect(not list(runs.folder.glob("*.tmp")), "something unfinished is left")
    output = runs.run(
        "export", "--checkpoint", runs.path("stickbreaking_all"), "--output", runs.path("no_fla"), "--format", "fla", code=3
    )
    expect("head_norm" in output and "forget_gate" in output, output)
    for name in ("stickbreaking", "stickbreaking_qwen"):
        runs.run("export", "--checkpoint", runs.path(name), "--output", runs.path(name + "_fla"), "--format", "fla")
        stored = read_weights(str(runs.path(name + "_fla")))
        expect("model.layers.0.attn.q_proj.weight" in stored and "model.embeddings.weight" in stored, str(list(stored)))
        runs.run("import", "--input", runs.path(name + "_fla"), "--output", runs.path(name + "_unfla"))
        expect(same_bits(weights_of(runs.path(name + "_unfla")), weights_of(runs.path(name))), "fla: other bits")


def check_hostile(runs):
    """Damaged and foreign folders are refused with the right code, and nothing is left behind."""
    good = runs.path("sharded")
    runs.run("export", "--checkpoint", runs.path("stickbreaking"), "--output", good, "--shard-gb", 2e-5)

    def refused(code, word, change, source=good):
        folder = runs.path("hostile")
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(source, folder)
        change(folder)
        output = runs.run("import", "--input", folder, "--output", runs.path("never"), code=code)
        expect(word in output, f"expected '{word}' in: {output}")
        expect(not runs.path("never").exists() and not runs.path("never.tmp").exists(), "something was written")

    def edit(name, change):
        def apply(folder):
            value = json.loads((folder / name).read_text())
            change(value)
            (folder / name).write_text(json.dumps(value))

        return apply

    index = "model.safetensors.index.json"
    refused(5, "00002-of", lambda f: next(f.glob("model-00002-of-*")).unlink())
    refused(5, "file in this folder", edit(index, lambda j: j["weight_map"].update({"model.norm.weight": "../x.safetensors"})))
    refused(5, "file in this folder", edit(index, lambda j: j["weight_map"].update({"model.norm.weight": "/etc/passwd"})))
    refused(5, "model.norm.weight", edit(index, lambda j: j["weight_map"].pop("model.norm.weight")))
    refused(5, "does not hold", edit(index, lambda j: j["weight_map"].update({"extra": j["weight_map"]["model.norm.weight"]})))
    refused(5, "", lambda f: (f / index).write_text("{"))
    refused(3, "inner", edit("config.json", lambda j: j["sbtrain"].update(inner=-3)))
    refused(3, "shape", edit("config.json", lambda j: j["sbtrain"].update(inner=60)))
    refused(3, "lack", edit("config.json", lambda j: j["sbtrain"].update(layers=3)))
    refused(3, "tensors", edit("config.json", lambda j: j["sbtrain"].update(layers=9999)))
    refused(3, "config.json", lambda f: (f / "config.json").write_text('{"model_type": "sbtrain", "sbtrain": {"norm_eps": NaN}}'))
    refused(3, "gpt_bigcode", edit("config.json", lambda j: j.update(model_type="gpt_bigcode")))
    refused(3, "config.json", lambda f: (f / "config.json").write_text("[1, 2]"))
    refused(3, "config.json", lambda f: (f / "config.json").unlink())
    llama = runs.path("llama_hf")
    def ropes(**parameters):
        return edit("config.json", lambda j: j.update(rope_parameters={"rope_theta": 5e5, **parameters}))

    refused(3, "low_freq_factor is missing", ropes(rope_type="llama3", factor=8), llama)
    refused(3, "high_freq_factor", ropes(rope_type="llama3", factor=8, low_freq_factor=4, high_freq_factor=1), llama)
    refused(3, "factor is missing", ropes(rope_type="yarn"), llama)
    refused(3, "truncate", ropes(rope_type="yarn", factor=8, truncate=False), llama)
    refused(3, "attention_factor", ropes(rope_type="yarn", factor=8, attention_factor="1"), llama)
    refused(3, "not a whole number", ropes(rope_type="yarn", factor=8, original_max_position_embeddings="2048"), llama)
    refused(3, "longrope", ropes(rope_type="longrope", factor=8), llama)
    refused(3, "head_dim is 0", edit("config.json", lambda j: j.update(head_dim=0)), llama)
    refused(3, "shape", edit("config.json", lambda j: j.update(head_dim=16)), llama)
    refused(3, "out of range", edit("config.json", lambda j: j.update(head_dim=1000000000000)), llama)
    refused(3, "hidden_act", edit("config.json", lambda j: j.update(hidden_act="gelu")), llama)
    refused(3, "num_hidden_layers", edit("config.json", lambda j: j.pop("num_hidden_layers")), llama)
    refused(3, "hidden_size", edit("config.json", lambda j: j.update(hidden_size=1e400)), llama)
    refused(5, "save_pretrained", lambda f: (f / "model.safetensors").unlink(), llama)

    def truncate(folder):
        data = (folder / "model.safetensors").read_bytes()
        (folder / "model.safetensors").write_bytes(data[: len(data) // 2])

    refused(5, "model.safetensors", truncate, llama)


def check_init_from(runs):
    """Continued pretraining, and attention swapped in a trained model."""
    model = CASES["llama"][1]
    start = weights_of(runs.path("llama"))
    still = ("--train.lr=0",)
    for name, source in (("from_run", runs.path("llama")), ("from_hf", runs.path("llama_hf"))):
        run = runs.train(name, model, "--init-from", source, *still)
        expect(same_bits(weights_of(run), start), f"{name}: other weights than {source}")
        record = json.loads((run / "init_from.json").read_text())
        expect(record["path"] == str(source) and not record["initialised"], str(record))
    # A run that continues does not load them again.
    before = weights_of(runs.train("again", model, "--init-from", runs.path("llama")))
    output = runs.run("train", "--config", runs.path("again.yaml"), "--out", runs.path("again"), "--init-from", "/nowhere")
    expect("complete" in output and same_bits(weights_of(runs.path("again")), before), output)
    swapped = {"attention": {**STICK, "head_norm": True}, "tied": False}
    output = runs.train("refused", swapped, "--init-from", runs.path("llama_hf"), code=3)
    expect("model.layers.1.self_attn.head_norm.weight" in output, output)
    run = runs.train("swapped", swapped, "--init-from", runs.path("llama_hf"), "--init-from-missing=initialise", *still)
    now = weights_of(run)
    expect(all(torch.equal(now[k], v) for k, v in start.items()), "the shared tensors are not those of the model")
    expect("model.layers.0.self_attn.head_norm.weight" in now, str(list(now)))
    record = json.loads((run / "init_from.json").read_text())
    expect(len(record["initialised"]) == 4 and not record["not_used"], str(record))
    run = runs.train("unswapped", model, "--init-from", run, "--init-from-missing=initialise", *still)
    expect(same_bits(weights_of(run), start), "back to softmax: other weights")
    # The model learns with its new attention.
    more = ("--init-from-missing=initialise", "--stages.0.length=40 steps")
    run = runs.train("learns", swapped, "--init-from", runs.path("llama_hf"), "--train.lr=0.01", *more)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [line["train/loss"] for line in lines if "train/loss" in line]
    expect(losses[-1] < losses[0] - 0.3, f"no falling loss: {losses}")
    runs.train("wider", {**model, "inner": 60}, "--init-from", runs.path("llama"), "--init-from-missing=initialise", code=3)
    runs.train("nowhere", model, "--init-from", runs.path("nothing"), code=5)
    # An imported folder has no moments to continue with, and says what to do.
    output = runs.train("llama_back", model, code=5)
    expect("--init-from" in output, output)


def peak_megabytes(runs, *arguments):
    """Runs the program and returns the most memory that it held, as its status said last."""
    child = subprocess.Popen(
        [runs.program, *map(str, arguments)], env=runs.environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    peak = 0
    while child.poll() is None:
        try:
            # Before the program is executed, the status is that of Python.
            if os.readlink(f"/proc/{child.pid}/exe") == os.path.realpath(runs.program):
                for line in open(f"/proc/{child.pid}/status"):
                    if line.startswith("VmHWM:"):
                        peak = max(peak, int(line.split()[1]) / 1024)
        except OSError:  # it has just ended
            pass
        time.sleep(0.002)
    expect(child.returncode == 0, f"{arguments}: exit code {child.returncode}")
    expect(peak > 0, "the program ended before its memory was read")
    return peak


def check_memory(runs):
    """A model of 200 MB needs no more memory, out or in, than a small one and 24 MiB for each thread."""
    inner, width, layers, vocab = 3072, 512, 8, 12000
    shapes = {"model.embed_tokens.weight": [vocab, width], "model.norm.weight": [width]}
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        for name in "qkvo":
            shapes[f"{prefix}self_attn.{name}_proj.weight"] = [width, width]
        shapes[prefix + "mlp.gate_proj.weight"] = shapes[prefix + "mlp.up_proj.weight"] = [inner, width]
        shapes[prefix + "mlp.down_proj.weight"] = [width, inner]
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{prefix}{name}.weight"] = [width]
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 4 * int(torch.tensor(shape).prod())
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    folder = runs.path("large")
    folder.mkdir()
    with open(folder / "model.safetensors", "wb") as file:  # zeros, which take no space
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    config = {"model_type": "llama", "vocab_size": vocab, "hidden_size": width, "intermediate_size": inner}
    config.update(num_hidden_layers=layers, num_attention_heads=8, tie_word_embeddings=True)
    (folder / "config.json").write_text(json.dumps(config))
    expect(end > 180e6, f"{end} bytes")
    base = peak_megabytes(runs, "ckpt", "verify", runs.path("llama"))
    room = 24 * min(os.cpu_count(), 16) + 20  # beside what the program and its libraries take
    into = peak_megabytes(runs, "import", "--input", folder, "--output", runs.path("large_run")) - base
    out = peak_megabytes(runs, "export", "--checkpoint", runs.path("large_run"), "--output", runs.path("large_hf")) - base
    report = f"{end / 1e6:.0f} MB: import {into:.0f} MB, export {out:.0f} MB of memory, limit {room:.0f}"
    expect(into < room and out < room and room < end / 1e6, report)
    return report


def check_tokenizer(runs):
    """The tokenizer of a folder gives the tokens of sentencepiece, and a run its model card's figures."""
    text = ROOT / "tests/data/english.jsonl"
    model = runs.path("tokenizer.model")
    runs.run("tokenizer", "train", "--input", text, "--vocab", 400, "--output", model)
    runs.run("prepare", "--input", text, "--tokenizer", model, "--output", runs.path("text.h5"))
    run = runs.path("text")
    config = {
        "name": "text",
        "device": "cpu",
        "model": {**BASE, "vocab": 400, "attention": ROPE},
        "train": {"sequence_length": LENGTH, "micro_batch": 2, "batch": 4},
        "data": {"sources": [{"path": str(runs.path("text.h5"))}], "validation": [str(runs.path("text.h5"))], "tokenizer": str(model)},
        "stages": [{"name": "a", "length": "2 steps"}],
        "validation": {"tokens": 256},
        "metrics": {"progress": False, "tensorboard": False},
    }
    runs.path("text.yaml").write_text(json.dumps(config))
    runs.run("train", "--config", runs.path("text.yaml"), "--out", run)
    folder = runs.path("text_hf")
    runs.run("export", "--checkpoint", run, "--output", folder)
    card = (folder / "README.md").read_text()
    expect("validation loss | " in card and "| 256 |" in card and "text.h5" in card, card)
    ids = json.loads((folder / "config.json").read_text())
    expect(ids["bos_token_id"] == 1 and ids["eos_token_id"] == 2, str(ids))
    # Through an import, the tokenizer stays the same file and says the same.
    back = runs.path("text_back")
    runs.run("import", "--input", folder, "--output", back)
    expect((back / "tokenizer.model").read_bytes() == model.read_bytes(), "another tokenizer")
    first, second = (
        runs.run("generate", "--checkpoint", x, "--prompt", "The", "--max-tokens", 8, "--temperature", 0).split("\n[")[0]
        for x in (run, back)
    )
    expect(first == second, f"{first!r} became {second!r}")
    other = runs.path("other.model")
    runs.run("tokenizer", "train", "--input", text, "--vocab", 390, "--output", other)
    runs.run("export", "--checkpoint", run, "--output", runs.path("foreign"), "--tokenizer", other, code=3)
    config["data"]["sources"][0]["path"] = str(runs.path("other.h5"))
    config["data"].pop("validation")
    config["data"].pop("tokenizer")
    runs.run("prepare", "--input", text, "--tokenizer", other, "--output", runs.path("other.h5"))
    runs.path("text.yaml").write_text(json.dumps(config))
    for source in (run, folder):
        output = runs.run("train", "--config", runs.path("text.yaml"), "--out", runs.path("foreign"), "--init-from", source, code=3)
        expect("tokenizer" in output, output)
    allowed = "--checkpoint.allow_changes=[data.tokenizer]"
    runs.run("train", "--config", runs.path("text.yaml"), "--out", runs.path("allowed"), "--init-from", folder, allowed)
    try:
        import sentencepiece
    except ImportError:
        return "good; without sentencepiece the tokens were not compared"
    if transformers is None:
        return "good; without transformers the tokens were not compared"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    original = sentencepiece.SentencePieceProcessor(model_file=str(model))
    lines = [json.loads(line)["text"] for line in open(text)]
    for sample in ["Hello world", " leading", "two  spaces\n\nnew\tline", "\u00fcn\u00ef \u2581 \u6f22 \U0001f600", "", *lines[:20]]:
        ours, theirs = tokenizer(sample[:2000], add_special_tokens=False)["input_ids"], original.encode(sample[:2000])
        expect(ours == theirs, f"{sample[:60]!r}: {ours[:20]} is not {theirs[:20]}")
    return "equal"


def check_tiktoken(runs):
    """A run with tiktoken's ranks: transformers reads the tokenizer of its export."""
    ranks = runs.path("llama3.tiktoken")
    shutil.copy(ROOT / "tests/data/tokenizer/o200k_base/o200k_base.tiktoken", ranks)
    runs.run("prepare", "--input", ROOT / "tests/data/english.jsonl", "--tokenizer", ranks, "--output", runs.path("ranks.h5"), "--bos")
    config = {
        "name": "ranks",
        "device": "cpu",
        "model": {**BASE, "vocab": 756, "attention": ROPE},
        "train": {"sequence_length": LENGTH, "micro_batch": 2, "batch": 4},
        "data": {"sources": [{"path": str(runs.path("ranks.h5"))}], "tokenizer": str(ranks)},
        "stages": [{"name": "a", "length": "2 steps"}],
        "metrics": {"progress": False, "tensorboard": False},
    }
    runs.path("ranks.yaml").write_text(json.dumps(config))
    runs.run("train", "--config", runs.path("ranks.yaml"), "--out", runs.path("ranks"))
    folder, back = runs.path("ranks_hf"), runs.path("ranks_back")
    runs.run("export", "--checkpoint", runs.path("ranks"), "--output", folder)
    runs.run("import", "--input", folder, "--output", back)
    expect((back / "llama3.tiktoken").read_bytes() == ranks.read_bytes(), "another tokenizer")
    expect(not (back / "tokenizer.json").exists(), "two tokenizers")
    written = [
        runs.run("generate", "--checkpoint", x, "--prompt", "The", "--max-tokens", 8, "--temperature", 0).split("\n[")[0]
        for x in (runs.path("ranks"), back)
    ]
    expect(written[0] == written[1], str(written))
    sys.path.append(str(ROOT / "tests/unit/tokenizer"))
    try:
        import tokenizer_reference as reference  # it ends the program without tokenizers and tiktoken
    except SystemExit:
        return "good; without tokenizers and tiktoken the tokens were not compared"
    if transformers is None:
        return "good; without transformers the tokens were not compared"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    table = {base64.b64decode(token): int(rank) for token, rank in map(bytes.split, ranks.read_bytes().splitlines())}
    special = {content: 500 + i for content, i in reference.LLAMA3_SPECIALS.items()}
    original = reference.tiktoken.Encoding("llama3", pat_str=reference.LLAMA3, mergeable_ranks=table, special_tokens=special)
    for text in reference.Hostile(2, list(special)).texts(2000):
        ours, theirs = tokenizer(text, add_special_tokens=False)["input_ids"], original.encode(text, allowed_special="all")
        expect(ours == theirs, f"{text[:60]!r}: {ours[:20]} is not {theirs[:20]}")
        expect(tokenizer.decode(ours) == original.decode(theirs), f"{text[:60]!r} is decoded to another text")
    expect(tokenizer("a")["input_ids"] == [500, *original.encode("a")], "no bos before a text")
    expect(tokenizer.eos_token == "<|end_of_text|>", str(tokenizer.eos_token))
    return "equal"


def main():
    folder = tempfile.mkdtemp()
    runs = Runs(sys.argv[1], folder)
    failures = 0
    checks = {name: lambda name=name: check_case(runs, name) for name in CASES}
    checks.update(tokenizer=lambda: check_tokenizer(runs), tiktoken=lambda: check_tiktoken(runs), memory=lambda: check_memory(runs))
    checks.update(families=lambda: check_families(runs))
    checks.update(options=lambda: check_options(runs), hostile=lambda: check_hostile(runs), init_from=lambda: check_init_from(runs))
    wanted = sys.argv[2:]
    try:
        for name, check in checks.items():
            if wanted and name not in wanted:
                continue
            try:
                print(f"{name}: {check() or 'good'}", flush=True)
            except (Failed, OSError, ValueError, RuntimeError, KeyError) as error:
                failures += 1
                print(f"{name}: FAILED: {type(error).__name__}: {error}", flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
