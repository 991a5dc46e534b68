#!/usr/bin/env python3
"""The PyTorch code that goes into exported folders, against the formulas of tests/parity/pytorch_reference.py.

For every attention module and option: packed documents, padding on either side, and generation with the
cache must give the logits of the formulas, which know one document at a time and no cache. So must models with
stick-breaking attention whose kernel (flash-linear-attention's, on a GPU) is replaced by one of this test, which
is called as that one is; fla_test.py runs the real one. And so must those that are computed by the op of
sbtrain-kernels, which has a CPU form.

Exit status: 0 equal, 1 not equal, 77 PyTorch is not installed.
"""
import math
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / folder) for folder in ("src/export/python", "tests/parity", "python/sbtrain-kernels")]
sys.dont_write_bytecode = True

import pytorch_reference as reference  # noqa: E402  exits with 77 where there is no PyTorch
import torch  # noqa: E402
import modeling_sbtrain  # noqa: E402
from modeling_sbtrain import SbtrainCache, SbtrainPlain  # noqa: E402

TOLERANCE = 1e-4
BASE = {"layers": 2, "width": 32, "inner": 44, "heads": 4, "vocab": 50, "tied": True}

STICK = {"type": "stickbreaking"}
SOFTMAX = {"type": "softmax"}
YARN = {"position": "rope", "rope_base": 300.0, "rope_scaling": "yarn", "rope_factor": 4.0, "rope_train_length": 30}
LLAMA3 = {
    "position": "rope", "rope_base": 300.0, "rope_scaling": "llama3", "rope_factor": 8.0, "rope_train_length": 60
}
CASES = {
    "stickbreaking": {"attention": STICK},
    "current": {"attention": {**STICK, "attend_current": True, "logit_scale": 0.3}},
    "remainder value": {"attention": {**STICK, "remainder": "value", "forget_gate": True}},
    "remainder bias": {"attention": {**STICK, "remainder": "bias", "head_norm": True, "output_bias": True}},
    "rope": {"attention": {**SOFTMAX, "position": "rope", "rope_base": 500.0}},
    "rope linear": {"attention": {**SOFTMAX, "position": "rope", "rope_scaling": "linear", "rope_factor": 2.5}},
    "rope ntk": {"attention": {**SOFTMAX, "position": "rope", "rope_scaling": "ntk", "rope_factor": 2.5}},
    "rope dynamic": {
        "attention": {**SOFTMAX, "position": "rope", "rope_scaling": "dynamic_ntk", "rope_factor": 2.0, "rope_train_length": 9}
    },
    "rope yarn": {"attention": {**SOFTMAX, **YARN}},
    "rope yarn factor": {"attention": {**SOFTMAX, **YARN, "rope_attention_factor": 0.7, "rope_beta_fast": 2.0}},
    "rope llama3": {"attention": {**SOFTMAX, **LLAMA3}, "head_dim": 32},
    "coca yarn": {"attention": {"type": "coca", **YARN}},
    "groups": {"attention": {**STICK, "remainder": "value"}, "kv_heads": 2},
    "groups norm": {"attention": {**STICK, "qk_norm": True, "qkv_bias": True}, "kv_heads": 1},
    "softmax groups norm": {"attention": {**SOFTMAX, "position": "rope", "qk_norm": True}, "kv_heads": 2},
    "coca groups norm": {"attention": {"type": "coca", "position": "rope", "qk_norm": True}, "kv_heads": 2},
    "narrow heads": {
        "attention": {**STICK, "remainder": "bias", "head_norm": True, "forget_gate": True}, "kv_heads": 2, "head_dim": 6
    },
    "broad heads": {"attention": {**SOFTMAX, "position": "rope", "qk_norm": True}, "kv_heads": 2, "head_dim": 16},
    "broad values": {"attention": {"type": "based", "feature_dim": 4}, "head_dim": 12},
    "window": {"attention": {**SOFTMAX, "position": "rope", "window": 5}},
    "none": {"attention": {**SOFTMAX, "position": "none"}, "tied": False},
    "alibi": {"attention": {**SOFTMAX, "position": "alibi", "window": 7}, "heads": 6, "width": 36},
    "fire": {"attention": {**SOFTMAX, "position": "fire"}},
    "fire from 20 tokens": {"attention": {**SOFTMAX, "position": "fire", "fire_length": 20}},
    "shared fire": {"attention": {**SOFTMAX, "position": "fire", "shared": True}},
    "coca": {"attention": {"type": "coca", "position": "rope", "variant": "official"}},
    "coca strict": {"attention": {"type": "coca", "position": "rope", "variant": "strict", "window": 6}},
    "based": {"attention": {"type": "based", "feature_dim": 4}},
    "rebased": {"attention": {"type": "rebased", "feature_dim": 4}},
    "rebased without gamma": {"attention": {"type": "rebased", "feature_dim": 4, "feature_gamma": False}},
    "rebased without norm": {"attention": {"type": "rebased", "feature_dim": 4, "feature_norm": False}},
    "rebased without a kernel": {"attention": {"type": "rebased", "feature_dim": 4, "feature_norm": False,
                                               "feature_gamma": False, "feature_beta": False}},
    "conv and rebased": {
        "attention": [{"type": "short_conv"}, {"type": "rebased", "feature_dim": 4}],
        "mlp": "none",
        "norm": "layernorm",
        "position": "learned",
        "max_positions": 40,
    },
    "gelu": {"attention": {**STICK, "output_bias": True}, "mlp": "gelu", "norm": "layernorm"},
    "gelu tanh": {
        "attention": {**SOFTMAX, "position": "none", "qkv_bias": True, "output_bias": True},
        "mlp": "gelu_tanh",
        "norm": "layernorm",
        "position": "learned",
        "max_positions": 40,
    },
    "rope fraction": {
        "attention": {**SOFTMAX, "position": "rope", "rope_fraction": 0.25, "qkv_bias": True, "output_bias": True},
        "mlp": "gelu",
        "norm": "layernorm",
        "parallel_residual": True,
        "head_dim": 16,
    },
    "rope fraction dynamic": {
        "attention": {
            **SOFTMAX, "position": "rope", "rope_fraction": 0.5, "rope_scaling": "dynamic_ntk", "rope_factor": 2.0, "rope_train_length": 9
        }
    },
    "parallel": {"attention": {**STICK, "remainder": "value"}, "parallel_residual": True, "residual_multiplier": 0.5},
    "norms at outputs": {
        "attention": {**SOFTMAX, "position": "rope", "qk_norm": True, "qk_norm_scope": "joint"},
        "norm_position": "output",
        "kv_heads": 2,
    },
    "joint norms": {
        "attention": [
            {**STICK, "qk_norm": True, "qk_norm_scope": "joint"},
            {"type": "coca", "position": "rope", "qk_norm": True, "qk_norm_scope": "joint"},
        ],
        "kv_heads": 2,
        "head_dim": 6,
    },
    "parallel norms at outputs": {
        "attention": [{"type": "short_conv"}, {**STICK, "head_norm": True}],
        "norm": "layernorm",
        "norm_position": "output",
        "parallel_residual": True,
        "mlp": "none",
    },
    "multipliers": {
        "attention": STICK,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.22,
        "logits_multiplier": 0.5,
        "norm_eps": 1e-3,
    },
    "mixed": {"attention": [{**SOFTMAX, "position": "rope"}, STICK]},
}


def make(case):
    """The model with random weights, and the same weights for the formulas."""
    config = {**BASE, **CASES[case]}
    torch.manual_seed(len(case))
    model = SbtrainPlain(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return config, model, {name: value.clone() for name, value in model.state_dict().items()}


def formula(weights, config, documents):
    """Logits of documents, one after the other: a list of [L, V]."""
    logits = []
    for tokens in documents:
        length = len(tokens)
        batch = {"tokens": tokens, "positions": torch.arange(length), "cu_seqlens": [0, length]}
        logits.append(reference.logits_of(weights, config, batch))
    return logits


def difference(a, b):
    return float((a - b).abs().max() / b.abs().max().clamp(min=1.0))


def packed(model, documents):
    ids = torch.cat(documents)[None]
    positions = torch.cat([torch.arange(len(d)) for d in documents])[None]
    return list(model(ids, position_ids=positions)[0].split([len(d) for d in documents]))


def padded(model, documents, left):
    longest = max(len(d) for d in documents)
    ids = torch.full((len(documents), longest), 7)
    mask = torch.zeros(len(documents), longest, dtype=torch.long)
    ranges = [slice(longest - len(d), longest) if left else slice(0, len(d)) for d in documents]
    for row, (tokens, where) in enumerate(zip(documents, ranges)):
        ids[row, where], mask[row, where] = tokens, 1
    logits = model(ids, attention_mask=mask)
    return [logits[row, where] for row, where in enumerate(ranges)]


def cached(model, documents):
    """A prompt of some tokens, two more at once, then one at a time, in rows padded on the left."""
    longest = max(len(d) for d in documents)
    ids = torch.full((len(documents), longest), 7)
    mask = torch.zeros(len(documents), longest, dtype=torch.long)
    for row, tokens in enumerate(documents):
        ids[row, longest - len(tokens) :], mask[row, longest - len(tokens) :] = tokens, 1
    cache, outputs = SbtrainCache(), []
    bounds = [0, longest - 5, longest - 3, longest - 2, longest - 1, longest]
    for begin, end in zip(bounds[:-1], bounds[1:]):
        outputs.append(model(ids[:, begin:end], attention_mask=mask[:, :end], cache=cache))
    return torch.cat(outputs, 1)[:, -3:]


class Kernel:
    """Takes what parallel_stickbreaking_attn takes: q [1, T, HQ, d], k and v [1, T, H, d], cu_seqlens [N + 1]."""

    def __init__(self):
        self.calls = 0

    def __call__(self, q, k, v, scale, attend_current, cu_seqlens):
        self.calls += 1
        outputs, remainders = torch.zeros_like(q), torch.zeros(q.shape[:3])
        group = q.shape[2] // k.shape[2]
        for begin, end in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist()):
            document = [x[:, begin:end].transpose(1, 2) for x in (q, k, v)]
            document[1:] = [x.repeat_interleave(group, 1) for x in document[1:]]
            visible = torch.ones(end - begin, end - begin, dtype=torch.bool).tril(0 if attend_current else -1)
            o, remainder = modeling_sbtrain.stickbreaking_attention(*document, scale, visible)
            outputs[:, begin:end], remainders[:, begin:end] = o.transpose(1, 2), remainder[..., 0].transpose(1, 2)
        return outputs, remainders


def with_kernel(config, model, documents, expected):
    """The same by way of a kernel, which is called where documents are whole."""
    options = config["attention"]
    if not isinstance(options, dict) or options["type"] != "stickbreaking":
        return {}
    kernel, chosen = Kernel(), modeling_sbtrain.stickbreaking_kernel
    modeling_sbtrain.stickbreaking_kernel = lambda q, v, gate: kernel if gate is None else None
    try:
        kinds = [packed(model, documents), padded(model, documents, True), padded(model, documents, False)]
        calls = kernel.calls
        torn = torch.tensor([[1, 1, 0, 0, 1, 1, 1]])  # a document around padding
        ids = torch.arange(torn.shape[1])[None]
        apart = model(ids, attention_mask=torn)[0][torn[0] == 1]
        last = cached(model, documents)
    finally:
        modeling_sbtrain.stickbreaking_kernel = chosen
    whole = model(ids[torn == 1][None])[0]
    errors = [max(difference(a, b) for a, b in zip(logits, expected)) for logits in kinds]
    errors += [difference(apart, whole), max(difference(last[row], x[-3:]) for row, x in enumerate(expected))]
    gated = options.get("forget_gate", False)
    called = calls == (0 if gated else 3 * config["layers"])
    return {"kernel": max(errors) if called else math.inf}


def with_op(config, model, documents, expected):
    """The same by the op of sbtrain-kernels, which is called but with a cache."""
    options = config["attention"]
    if not isinstance(options, dict) or options["type"] != "stickbreaking":
        return {}
    calls = []

    def counted(q, *arguments, **options):
        calls.append(q.shape)
        return modeling_sbtrain.sbtrain_stickbreaking()(q, *arguments, **options)

    chosen = modeling_sbtrain.stickbreaking_op
    modeling_sbtrain.stickbreaking_op = lambda q: counted
    try:
        kinds = [packed(model, documents), padded(model, documents, True), padded(model, documents, False)]
        kinds.append([model(d[None])[0] for d in documents])
        last = cached(model, documents)
    finally:
        modeling_sbtrain.stickbreaking_op = chosen
    errors = [max(difference(a, b) for a, b in zip(logits, expected)) for logits in kinds]
    errors.append(max(difference(last[row], x[-3:]) for row, x in enumerate(expected)))
    # Once in each layer for every batch, for every document, and for the prompt before the cache has anything.
    called = len(calls) == (3 + len(documents) + 1) * config["layers"]
    return {"op": max(errors) if called else math.inf}


def errors_of(case):
    config, model, weights = make(case)
    generator = torch.Generator().manual_seed(1)
    documents = [torch.randint(config["vocab"], (n,), generator=generator) for n in (9, 17, 12)]
    dynamic = CASES[case]["attention"].get("rope_scaling") == "dynamic_ntk" if isinstance(config["attention"], dict) else False
    if dynamic:  # the rotation depends on the longest document of the batch
        documents = [d[:9] for d in documents]
    with torch.no_grad():
        expected = formula(weights, config, documents)
        kinds = {
            "packed": packed(model, documents),
            "padded left": padded(model, documents, True),
            "padded right": padded(model, documents, False),
        }
        errors = {
            kind: max(difference(a, b) for a, b in zip(logits, expected)) for kind, logits in kinds.items()
        }
        last = cached(model, documents)
        errors["cached"] = max(
            difference(last[row], logits[-3:]) for row, logits in enumerate(expected)
        )
        errors.update(with_kernel(config, model, documents, expected))
        if modeling_sbtrain.sbtrain_stickbreaking():  # not where PyTorch is older than 2.4
            errors.update(with_op(config, model, documents, expected))
        if dynamic:
            long = torch.randint(config["vocab"], (23,), generator=generator)
            errors["longer"] = difference(model(long[None])[0], formula(weights, config, [long])[0])
        # In bfloat16, as models are mostly run, everything between the sums is of that type.
        brain = model.bfloat16()(documents[0][None])
        rounding = difference(brain[0].float(), expected[0])
        errors["bfloat16"] = 0.0 if brain.dtype == torch.bfloat16 and rounding < 0.2 else math.inf
    return errors


def main():
    good = True
    for case in CASES:
        for kind, error in errors_of(case).items():
            agrees = error <= TOLERANCE  # false for NaN
            good &= agrees
            if not agrees:
                print(f"{case}, {kind}: {error:.2e}  TOO LARGE")
    print(f"{len(CASES)} models with PyTorch {torch.__version__}: {'equal' if good else 'NOT EQUAL'}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
