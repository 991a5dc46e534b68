#!/usr/bin/env python3
"""Times one training step of a configuration in PyTorch on a GPU.

    pytorch_gpu.py --config configs/1b_rope.yaml --batch 8 [--steps N] [--sdpa cudnn|flash]
                   [--stickbreaking sbtrain|fla|FOLDER] [--no-compile] [--compile-mode MODE] [--bf16-parameters]

The counterpart of `sbtrain bench train`: the same shapes (read from the YAML, or, without PyYAML,
from what `sbtrain config show --flat` prints, in a file *.flat), the same operations
(RMSNorm, SwiGLU, rotary positions, tied or untied head, mean cross-entropy, global-norm clipping,
AdamW), the same tokens per step, random tokens, one document per sequence; muP's multipliers and rates are left out,
since they would cost time here alone. It is what a careful
user of PyTorch would write: torch.compile, bf16 autocast over fp32 weights, a residual stream in
bf16, fused AdamW, cuDNN's attention. Stick-breaking needs the published Triton kernels, the package
`stickbreaking_attention`, installed or in FOLDER (default: $STICKBREAKING_ATTENTION), or with `fla` those of
flash-linear-attention (packages `fla-core` and `einops`). `sbtrain` takes the op of sbtrain-kernels instead, which is
compiled with the model (docs/python.md; $SBTRAIN_ATTENTION_LIBRARY names the library where the wheel is not installed).

Prints one line of JSON: the median and the quartiles of a step in seconds, tokens per second, and the
peak memory. Exit status 77 means that PyTorch, a GPU or the package is missing. --device cpu runs
the same code without a GPU, as a check.
"""
import argparse
import contextlib
import json
import math
import os
import pathlib
import sys
import time

from pytorch_step import F, load_config, nn, torch


def load_flat(path):
    """The tree of key=value lines with dotted keys; a number in a key is the index of a list."""
    tree = {}
    with open(path) as file:
        for line in file:
            key, _, text = line.strip().partition("=")
            *path_of_key, last = key.split(".")
            at = tree
            for name in path_of_key:
                at = at.setdefault(name, {})
            try:
                at[last] = json.loads(text)
            except ValueError:
                at[last] = text

    def with_lists(node):
        if not isinstance(node, dict):
            return node
        values = {name: with_lists(value) for name, value in node.items()}
        if values and all(name.isdigit() for name in values):
            return [values[name] for name in sorted(values, key=int)]
        return values

    return with_lists(tree)


def fail_unavailable(what):
    print(f"not available: {what}", file=sys.stderr)
    sys.exit(77)


def published_stickbreaking(folder):
    """sb_attn(q, k, v, inv_temp) of [B, H, L, d] tensors; returns o and the remainder."""
    if folder:
        sys.path.insert(0, folder)
    try:
        from stickbreaking_attention.sb_attn import sb_attn
    except ImportError as error:
        return None, str(error)
    return sb_attn, ""


def fla_stickbreaking():
    """The same by flash-linear-attention, whose tensors are [B, L, H, d]."""
    try:
        from fla.ops.stickbreaking_attn import parallel_stickbreaking_attn
    except (ImportError, RuntimeError) as error:
        return None, str(error)

    def kernel(q, k, v, inv_temp):
        q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
        o, remainder = parallel_stickbreaking_attn(q, k, v, scale=inv_temp)[:2]
        return o.transpose(1, 2), remainder

    return kernel, ""


def sbtrain_stickbreaking():
    """The same by sbtrain's op. It skips no keys: the random weights of a new model use sticks up soon."""
    sys.path.append(str(pathlib.Path(__file__).resolve().parents[2] / "python/sbtrain-kernels"))
    try:
        from sbtrain.torch import stickbreaking_attention as op
    except ImportError as error:
        return None, str(error)
    return lambda q, k, v, inv_temp: op(q, k, v, scale=inv_temp, heads_first=True, skip_epsilon=0.0), ""


def choose_stickbreaking(choice):
    """attend(q, k, v, scale) by "sbtrain", "fla" or the package in a folder."""
    choices = {"sbtrain": sbtrain_stickbreaking, "fla": fla_stickbreaking}
    kernel, why = choices[choice]() if choice in choices else published_stickbreaking(choice)
    if kernel is None:
        fail_unavailable(f"the stick-breaking kernels ({why})")
    if choice == "sbtrain":
        return lambda q, k, v, scale: kernel(q, k, v, scale)[0]
    return stickbreaking_attention(kernel)


def sdpa_backend(name):
    """A context in which scaled_dot_product_attention runs on the backend, or not at all."""
    if name == "any":
        return contextlib.nullcontext()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    backends = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
    return sdpa_kernel(backends[name])


def softmax_attention(q, k, v, scale):
    if hasattr(F, "scaled_dot_product_attention"):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    length = q.shape[-2]  # before PyTorch 2
    later = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
    return torch.softmax((scale * q @ k.transpose(-1, -2)).masked_fill(later, -math.inf), -1) @ v


def stickbreaking_attention(kernel):
    def attend(q, k, v, scale):
        return kernel(q, k, v, inv_temp=scale)[0]

    # torch.compile must leave it as it is, since the kernels are compiled by Triton already.
    compiler = getattr(torch, "compiler", None)
    return compiler.disable(attend) if compiler is not None else attend


def rope(x, cos, sin):
    half = x.shape[-1] // 2
    x1, x2 = x[..., :half].float(), x[..., half:].float()
    return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], -1).to(x.dtype)


class RMSNorm(nn.Module):
    def __init__(self, width, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x):
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps) * self.weight.float()
        return y.to(x.dtype)


class Block(nn.Module):
    def __init__(self, model, options, attend):
        super().__init__()
        width = model["width"]
        # Matrix products are slow if a width is not a multiple of 8; sbtrain pads such a width too.
        inner = model["inner"] if model["inner"] % 8 == 0 else (model["inner"] + 63) // 64 * 64
        self.heads = model["heads"]
        self.head_dim = width // self.heads
        self.scale = options.get("logit_scale") or self.head_dim**-0.5
        self.softmax = options.get("type", "stickbreaking") == "softmax"
        self.rotates = self.softmax and options.get("position", "rope") == "rope"
        self.attend = softmax_attention if self.softmax else attend
        self.norm1 = RMSNorm(width, model["norm_eps"])
        self.norm2 = RMSNorm(width, model["norm_eps"])
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate_up = nn.Linear(width, 2 * inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x, cos, sin):
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, self.head_dim)
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
        if self.rotates:
            q, k = rope(q, cos, sin), rope(k, cos, sin)
        o = self.attend(q, k, v, self.scale)
        x = x + self.out(o.transpose(1, 2).reshape(batch, length, width))
        gate, up = self.gate_up(self.norm2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Llama(nn.Module):
    def __init__(self, model, length, stickbreaking):
        super().__init__()
        modules = model["attention"]
        modules = [modules] if isinstance(modules, dict) else modules
        for options in modules:
            for key in ("head_norm", "forget_gate", "attend_current"):
                if options.get(key):
                    sys.exit(f"pytorch_gpu: {key} has no counterpart here")
            if options.get("remainder", "none") != "none":
                sys.exit("pytorch_gpu: remainders have no counterpart here")
        self.embedding = nn.Embedding(model["vocab"], model["width"])
        self.blocks = nn.ModuleList(
            Block(model, modules[layer % len(modules)], stickbreaking)
            for layer in range(model["layers"])
        )
        self.norm = RMSNorm(model["width"], model["norm_eps"])
        self.head = nn.Linear(model["width"], model["vocab"], bias=False)
        if model["tied"]:
            self.head.weight = self.embedding.weight
        for weight in self.parameters():
            if weight.dim() == 2:
                nn.init.normal_(weight, std=model["init_std"])
        half = model["width"] // model["heads"] // 2
        base = float(modules[0].get("rope_base", 10000.0))
        angle = torch.arange(length).double()[:, None] * base ** (
            -torch.arange(half).double() / half
        )
        self.register_buffer("cos", angle.cos().float(), persistent=False)
        self.register_buffer("sin", angle.sin().float(), persistent=False)

    def forward(self, tokens, targets):
        x = self.embedding(tokens).to(torch.bfloat16)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def make_optimizer(network, train, fused):
    groups = [
        {"params": [w for w in network.parameters() if w.dim() == 2],
         "weight_decay": train.get("weight_decay", 0.1)},
        {"params": [w for w in network.parameters() if w.dim() != 2], "weight_decay": 0.0},
    ]  # fmt: skip
    return torch.optim.AdamW(
        groups,
        lr=float(train.get("lr", 1e-3)),
        betas=(train.get("beta1", 0.9), train.get("beta2", 0.95)),
        eps=float(train.get("eps", 1e-8)),
        **({"fused": True} if fused else {}),
    )


def measure(config, arguments):
    # Defaults of docs/config.md.
    model = {
        "layers": 4, "width": 128, "inner": 344, "heads": 4, "vocab": 4096, "tied": True,
        "norm_eps": 1e-5, "init_std": 0.02, "attention": {"type": "stickbreaking"},
        **config.get("model", {}),
    }  # fmt: skip
    model["norm_eps"] = float(model["norm_eps"])
    train = config.get("train", {})
    length = train.get("sequence_length", 256)
    batch = arguments.batch or train.get("micro_batch", 4)
    clip = train.get("clip", 1.0)
    cuda = arguments.device == "cuda"
    if cuda and not torch.cuda.is_available():
        fail_unavailable("a CUDA device")

    modules = model["attention"]
    modules = [modules] if isinstance(modules, dict) else modules
    stickbreaking = None
    if any(options.get("type", "stickbreaking") != "softmax" for options in modules):
        stickbreaking = choose_stickbreaking(arguments.stickbreaking)

    torch.manual_seed(1)
    with torch.device(arguments.device):  # a CPU would take long for a billion random numbers
        network = Llama(model, length, stickbreaking)
    if arguments.bf16_parameters:
        cos, sin = network.cos, network.sin
        network = network.to(torch.bfloat16)
        network.cos, network.sin = cos, sin
    network = network.to(arguments.device)
    optimizer = make_optimizer(network, train, cuda)
    forward = network
    if arguments.compile:
        forward = torch.compile(network, mode=arguments.compile_mode)

    def synchronize():
        if cuda:
            torch.cuda.synchronize()

    def autocast():
        if arguments.bf16_parameters:
            return contextlib.nullcontext()
        return torch.autocast(arguments.device, dtype=torch.bfloat16)

    def step(tokens):
        optimizer.zero_grad(set_to_none=True)
        with autocast():
            loss = forward(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(network.parameters(), clip)
        optimizer.step()
        return loss

    def timed_step():
        tokens = torch.randint(model["vocab"], (batch, length + 1), device=arguments.device)
        synchronize()
        begin = time.perf_counter()
        loss = step(tokens)
        synchronize()
        seconds = time.perf_counter() - begin
        if not math.isfinite(loss.item()):
            sys.exit("pytorch_gpu: the loss is not finite")
        return seconds

    with sdpa_backend(arguments.sdpa) if cuda else contextlib.nullcontext():
        for _ in range(arguments.warmup):
            timed_step()
        times = sorted(timed_step() for _ in range(arguments.steps))
    median = times[len(times) // 2]
    return {
        "framework": f"PyTorch {torch.__version__}" + (" compiled" if arguments.compile else ""),
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "sdpa": arguments.sdpa,
        "parameters": sum(w.numel() for w in network.parameters()),
        "tokens_per_step": batch * length,
        "steps": len(times),
        "step_seconds": median,
        "step_seconds_quartiles": [times[len(times) // 4], times[3 * len(times) // 4]],
        "tokens_per_second": batch * length / median,
        "memory_bytes": torch.cuda.max_memory_reserved() if cuda else 0,
    }


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", required=True)
    parser.add_argument("--batch", type=int, default=0, help="sequences in a step")
    parser.add_argument("--steps", type=int, default=20, help="timed steps")
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--sdpa", default="cudnn", choices=["cudnn", "flash", "any"])
    parser.add_argument("--stickbreaking", metavar="sbtrain|fla|FOLDER",
                        default=os.environ.get("STICKBREAKING_ATTENTION", ""))  # fmt: skip
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    parser.add_argument("--compile-mode", default="default", help="of torch.compile")
    parser.add_argument("--bf16-parameters", action="store_true",
                        help="weights and moments in bf16: faster, and not what sbtrain does")  # fmt: skip
    arguments = parser.parse_args()
    load = load_flat if arguments.config.endswith(".flat") else load_config
    print(json.dumps(measure(load(arguments.config), arguments)))


if __name__ == "__main__":
    main()
