#!/usr/bin/env python3
"""Stick-breaking models on a GPU by way of flash-linear-attention.

    tests/interop/with_python.sh tests/interop/fla_test.py SBTRAIN

Small models are trained for some steps on the CPU and exported. On the GPU, in bfloat16:
- flash-linear-attention's StickBreakingAttentionForCausalLM loads the folder of `export --format fla`, and its
  loss is that of the exported checkpoint, computed in float32 on the CPU by the formulas, within what bfloat16
  rounds;
- modeling_sbtrain.py, which calls flash-linear-attention's kernel, gives the outputs and the gradients that it
  gives without the kernel: packed documents, padding, groups of heads, the norm of queries and keys, remainders,
  head norm, and heads of another size.

Exit status: 0 good, 1 not good, 77 there is no GPU, or PyTorch, transformers or flash-linear-attention is missing.
"""
import contextlib
import pathlib
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path += [str(ROOT / "src/export/python"), str(ROOT / "tests/interop")]
sys.dont_write_bytecode = True
try:
    import torch
    import transformers

    if not torch.cuda.is_available():
        print("skipped: PyTorch finds no GPU")
        sys.exit(77)
    from fla.models import StickBreakingAttentionForCausalLM
except ImportError as error:
    print(f"skipped: {error} (install torch, transformers and flash-linear-attention 0.6)")
    sys.exit(77)
import modeling_sbtrain  # noqa: E402
import round_trip_test  # noqa: E402
from round_trip_test import VOCAB, Failed, Runs, expect, plain, weights_of  # noqa: E402

STICK = {"type": "stickbreaking"}
SHAPE = {"width": 128, "inner": 256, "heads": 4, "init_std": 0.1}

# What flash-linear-attention's own model can hold.
FLA = {
    "plain": {"attention": STICK},
    "current": {"attention": {**STICK, "attend_current": True}, "tied": False},
    "groups": {"attention": {**STICK, "qk_norm": True, "qkv_bias": True}, "kv_heads": 2, "norm_eps": 1e-6},
    "scale": {"attention": {**STICK, "logit_scale": 0.3}, "kv_heads": 1, "logits_multiplier": 0.7},
}
# What its kernel can compute for our code.
KERNEL = {
    **FLA,
    "value": {"attention": {**STICK, "remainder": "value", "attend_current": True}, "kv_heads": 2},
    "bias": {"attention": {**STICK, "remainder": "bias", "head_norm": True, "output_bias": True}},
    "narrow heads": {"attention": {**STICK, "qk_norm": True}, "kv_heads": 2, "head_dim": 16},
    "broad heads": {"attention": STICK, "head_dim": 96},
}

# In plain PyTorch these models differ between bfloat16 and float32 by up to 2e-4 of the loss and by up to 2.3e-2 of
# a gradient; here two results that are rounded differently are compared.
LOSS_ERROR = 2e-3  # relative
TENSOR_ERROR = 5e-2  # Frobenius norm, relative


def loss_of(logits, tokens):
    return torch.nn.functional.cross_entropy(logits[:-1].float(), tokens[1:])


def relative(a, b):
    a, b = a.double().cpu(), b.double().cpu()
    return float((a - b).norm() / b.norm().clamp(min=1e-30))


def check_fla(runs, name):
    model = {**SHAPE, **FLA[name]}
    run = runs.train(name, model)
    folder = runs.path(name + "_fla")
    runs.run("export", "--checkpoint", run, "--output", folder, "--format", "fla", "--dtype", "bf16")
    torch.manual_seed(1)
    tokens = torch.randint(VOCAB, (300,))
    theirs = StickBreakingAttentionForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).cuda().eval()
    rounded = {key: value.bfloat16().float() for key, value in weights_of(run).items()}
    with torch.no_grad():
        expected = float(loss_of(plain(model, rounded)(tokens[None])[0], tokens))
        ids = tokens[None].cuda()
        actual = float(theirs(input_ids=ids, labels=ids).loss)
    error = abs(actual - expected) / expected
    expect(error <= LOSS_ERROR, f"loss {actual:.5f}, ours {expected:.5f}: {error:.1e} apart")
    return f"loss {actual:.5f}, ours {expected:.5f}"


class Counted:
    """The kernel, and how often it is called."""

    def __init__(self, kernel):
        self.kernel, self.calls = kernel, 0

    def __call__(self, *arguments, **options):
        self.calls += 1
        return self.kernel(*arguments, **options)


@contextlib.contextmanager
def kernel_or_none(kernel):
    chosen, op = modeling_sbtrain.fla_stickbreaking, modeling_sbtrain.sbtrain_stickbreaking
    modeling_sbtrain.fla_stickbreaking, modeling_sbtrain.sbtrain_stickbreaking = lambda: kernel, lambda: None
    try:
        yield
    finally:
        modeling_sbtrain.fla_stickbreaking, modeling_sbtrain.sbtrain_stickbreaking = chosen, op


def outputs_and_gradients(module, arguments, valid):
    module.zero_grad()
    logits = module(**arguments)[valid]
    targets = torch.arange(len(logits), device=logits.device) % logits.shape[-1]
    torch.nn.functional.cross_entropy(logits.float(), targets).backward()
    gradients = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    return {"logits": logits.detach(), **gradients}


def check_kernel(name):
    config = {**round_trip_test.BASE, **SHAPE, **KERNEL[name]}
    torch.manual_seed(2)
    module = modeling_sbtrain.SbtrainPlain(config)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    module = module.bfloat16().cuda()
    lengths = (150, 1, 65, 84)
    ids = torch.randint(VOCAB, (3, sum(lengths)), device="cuda")
    positions = torch.cat([torch.arange(n) for n in lengths]).cuda().expand(3, -1)
    left = torch.ones_like(ids)
    left[1, :70], left[2, :131] = 0, 0
    inputs = {
        "documents": ({"input_ids": ids, "position_ids": positions}, torch.ones_like(ids).bool()),
        "padded left": ({"input_ids": ids, "attention_mask": left}, left.bool()),
        "padded right": ({"input_ids": ids, "attention_mask": left.flip(1)}, left.flip(1).bool()),
    }
    kernel, worst = Counted(modeling_sbtrain.fla_stickbreaking()), 0.0
    for kind, (arguments, valid) in inputs.items():
        before = kernel.calls
        with kernel_or_none(kernel):
            ours = outputs_and_gradients(module, arguments, valid)
        expect(kernel.calls == before + config["layers"], f"{kind}: the kernel was called {kernel.calls - before} times")
        with kernel_or_none(None):
            formula = outputs_and_gradients(module, arguments, valid)
        expect(set(ours) == set(formula), f"{kind}: other parameters have gradients")
        for key, expected in formula.items():
            error = relative(ours[key], expected)
            expect(error <= TENSOR_ERROR, f"{kind}: {key} is {error:.1e} apart")
            worst = max(worst, error)
    return f"at most {worst:.1e} apart"


def main():
    transformers.logging.set_verbosity_error()
    failures = 0
    with tempfile.TemporaryDirectory() as folder:
        runs = Runs(sys.argv[1], folder)
        checks = {f"fla {name}": lambda name=name: check_fla(runs, name) for name in FLA}
        checks.update({f"kernel {name}": lambda name=name: check_kernel(name) for name in KERNEL})
        for name, check in checks.items():
            try:
                print(f"{name}: {check()}", flush=True)
            except (Failed, OSError, ValueError, RuntimeError, KeyError) as error:
                failures += 1
                print(f"{name}: FAILED: {type(error).__name__}: {error}", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
