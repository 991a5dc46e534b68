#!/usr/bin/env python3
"""Times one training step of a configuration in plain PyTorch on the CPU.

    pytorch_step.py --config configs/tiny_sb.yaml [--threads N] [--steps N] [--compile]

The counterpart of `sbtrain bench`: the same shapes (read from the YAML), the same operations
(RMSNorm, SwiGLU, tied or untied head, mean cross-entropy, global-norm clipping, AdamW), the same
tokens per step, fp32, random tokens, one document per sequence unless --documents says otherwise.
Stick-breaking is the usual vectorised form in log space with its [B, H, L, L] matrices; softmax is
scaled_dot_product_attention where PyTorch has it. AdamW is the fused one where PyTorch has it.

Prints one line of JSON: the median and the quartiles of a step in seconds, and tokens per second.
Exit status 77 means that PyTorch is not installed.
"""
import argparse
import json
import math
import os
import sys
import time


def help_openblas():
    """An OpenBLAS that is older than the processor falls back to its slowest kernels. sbtrain corrects
    this for itself, so for a fair comparison it is corrected here as well. MKL is not affected."""
    try:
        with open("/proc/cpuinfo") as file:
            flags = next(line for line in file if line.startswith("flags")).split()
    except (OSError, StopIteration):
        return
    if {"avx512f", "avx512bw", "avx512dq", "avx512vl"} <= set(flags):
        os.environ.setdefault("OPENBLAS_CORETYPE", "SkylakeX")
    elif {"avx2", "fma"} <= set(flags):
        os.environ.setdefault("OPENBLAS_CORETYPE", "Haswell")


help_openblas()
try:
    import torch
    import torch.nn.functional as F
    from torch import nn
except ImportError as error:
    print(f"skipped: {error} (install python3-torch)", file=sys.stderr)
    sys.exit(77)
try:
    import yaml
except ImportError:
    yaml = None


class Nothing(torch.autograd.Function):
    """An op that computes nothing: the time of its step is torch's own."""

    @staticmethod
    def forward(ctx, q, k, v):
        ctx.save_for_backward(q, k, v)
        return torch.empty_like(q)

    @staticmethod
    def backward(ctx, d_o):
        return tuple(torch.empty_like(x) for x in ctx.saved_tensors)


def merge(below, above):
    """`above` over `below`, mapping by mapping."""
    if not (isinstance(below, dict) and isinstance(above, dict)):
        return above
    merged = dict(below)
    for key, value in above.items():
        merged[key] = merge(below.get(key), value)
    return merged


def load_config(path):
    if yaml is None:
        print("skipped: configurations need PyYAML (install python3-yaml)", file=sys.stderr)
        sys.exit(77)
    with open(path) as file:
        own = yaml.safe_load(file) or {}
    includes = own.pop("include", [])
    config = {}
    for name in [includes] if isinstance(includes, str) else includes:
        config = merge(config, load_config(os.path.join(os.path.dirname(path), name)))
    return merge(config, own)


class RMSNorm(nn.Module):
    def __init__(self, width, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class Masks:
    """The tensors that depend only on the documents, made once for all layers and steps."""

    def __init__(self, sequences, length, documents, head_dim, rope_base):
        edges = [length * n // documents for n in range(documents + 1)]
        ids = torch.zeros(length, dtype=torch.long)
        positions = torch.zeros(length, dtype=torch.long)
        for n, (begin, end) in enumerate(zip(edges[:-1], edges[1:])):
            ids[begin:end] = n
            positions[begin:end] = torch.arange(end - begin)
        same = ids[:, None] == ids[None, :]
        self.causal = torch.ones(length, length).tril().bool() & same  # i <= j
        self.strict = torch.ones(length, length).tril(-1).bool() & same  # i < j
        self.whole = documents == 1
        half = head_dim // 2
        angle = positions[:, None] * rope_base ** (-torch.arange(half).double() / half)
        self.cos, self.sin = angle.cos().float(), angle.sin().float()


def rope(x, masks):
    half = x.shape[-1] // 2
    x1, x2 = x[..., :half], x[..., half:]
    return torch.cat([x1 * masks.cos - x2 * masks.sin, x2 * masks.cos + x1 * masks.sin], -1)


def softmax_attention(q, k, v, scale, masks):
    if hasattr(F, "scaled_dot_product_attention"):
        if masks.whole:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=masks.causal, scale=scale)
    z = scale * q @ k.transpose(-1, -2)
    return torch.softmax(z.masked_fill(~masks.causal, -math.inf), -1) @ v


def stickbreaking_attention(q, k, v, scale, masks, options):
    seen = masks.causal if options.get("attend_current") else masks.strict
    z = scale * q @ k.transpose(-1, -2)
    log_keep = F.logsigmoid(-z)  # log (1 - beta); log beta = z + log (1 - beta)
    summed = log_keep.masked_fill(~seen, 0.0).cumsum(-1)
    a = torch.exp((z + log_keep + summed[..., -1:] - summed).masked_fill(~seen, -math.inf))
    o = a @ v
    if options.get("remainder", "none") == "value":
        o = o + (1 - a.sum(-1, keepdim=True)) * v
    return o


class Block(nn.Module):
    def __init__(self, model, options):
        super().__init__()
        width, inner = model["width"], model["inner"]
        self.heads = model["heads"]
        self.options = options
        self.norm1 = RMSNorm(width, model["norm_eps"])
        self.norm2 = RMSNorm(width, model["norm_eps"])
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate_up = nn.Linear(width, 2 * inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def attention(self, x, masks):
        batch, length, width = x.shape
        d = width // self.heads
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, d).permute(2, 0, 3, 1, 4)
        scale = self.options.get("logit_scale") or d**-0.5
        if self.options.get("type", "stickbreaking") == "softmax":
            if self.options.get("position", "rope") == "rope":
                q, k = rope(q, masks), rope(k, masks)
            o = softmax_attention(q, k, v, scale, masks)
        else:
            o = stickbreaking_attention(q, k, v, scale, masks, self.options)
        return self.out(o.transpose(1, 2).reshape(batch, length, width))

    def forward(self, x, masks):
        x = x + self.attention(self.norm1(x), masks)
        gate, up = self.gate_up(self.norm2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class Llama(nn.Module):
    def __init__(self, model):
        super().__init__()
        modules = model["attention"]
        modules = [modules] if isinstance(modules, dict) else modules
        for options in modules:
            for key in ("head_norm", "forget_gate"):
                if options.get(key):
                    sys.exit(f"pytorch_step: {key} has no counterpart here")
            if options.get("remainder") == "bias":
                sys.exit("pytorch_step: remainder: bias has no counterpart here")
        self.embedding = nn.Embedding(model["vocab"], model["width"])
        self.blocks = nn.ModuleList(
            Block(model, modules[layer % len(modules)]) for layer in range(model["layers"])
        )
        self.norm = RMSNorm(model["width"], model["norm_eps"])
        self.head = nn.Linear(model["width"], model["vocab"], bias=False)
        if model["tied"]:
            self.head.weight = self.embedding.weight
        for weight in self.parameters():
            if weight.dim() == 2:
                nn.init.normal_(weight, std=model["init_std"])

    def forward(self, tokens, targets, masks):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, masks)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)


def make_optimizer(network, train):
    matrices = [w for w in network.parameters() if w.dim() == 2]
    vectors = [w for w in network.parameters() if w.dim() != 2]
    groups = [
        {"params": matrices, "weight_decay": train.get("weight_decay", 0.1)},
        {"params": vectors, "weight_decay": 0.0},
    ]
    options = {
        "lr": float(train.get("lr", 1e-3)),
        "betas": (train.get("beta1", 0.9), train.get("beta2", 0.95)),
        "eps": float(train.get("eps", 1e-8)),
    }
    try:
        optimizer = torch.optim.AdamW(groups, fused=True, **options)
        probe = torch.zeros(1, requires_grad=True)
        torch.optim.AdamW([probe], fused=True)
        return optimizer
    except (RuntimeError, TypeError):  # before PyTorch 2.4 the fused one needs a GPU
        return torch.optim.AdamW(groups, **options)


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
    batch, micro_batch = train.get("batch", 4), train.get("micro_batch", 4)
    clip = train.get("clip", 1.0)

    torch.manual_seed(1)
    torch.set_num_threads(arguments.threads)
    network = Llama(model)
    optimizer = make_optimizer(network, train)
    first = model["attention"] if isinstance(model["attention"], dict) else model["attention"][0]
    masks = Masks(
        micro_batch, length, arguments.documents, model["width"] // model["heads"],
        float(first.get("rope_base", 10000.0)),
    )  # fmt: skip
    forward = torch.compile(network) if arguments.compile else network

    def random_batches():
        shape = (micro_batch, length + 1)
        return [torch.randint(model["vocab"], shape) for _ in range(batch // micro_batch)]

    def step(batches):
        optimizer.zero_grad(set_to_none=True)
        for tokens in batches:
            loss = forward(tokens[:, :-1], tokens[:, 1:], masks)
            (loss * (micro_batch / batch)).backward()
        if clip:
            nn.utils.clip_grad_norm_(network.parameters(), clip)
        optimizer.step()
        return loss.item()

    for _ in range(arguments.warmup):
        step(random_batches())
    times = []
    for _ in range(arguments.steps):
        batches = random_batches()
        begin = time.perf_counter()
        step(batches)
        times.append(time.perf_counter() - begin)
    times.sort()
    median = times[len(times) // 2]
    return {
        "framework": f"PyTorch {torch.__version__}" + (" compiled" if arguments.compile else ""),
        "threads": arguments.threads,
        "parameters": sum(w.numel() for w in network.parameters()),
        "tokens_per_step": batch * length,
        "steps": len(times),
        "step_seconds": median,
        "step_seconds_quartiles": [times[len(times) // 4], times[3 * len(times) // 4]],
        "tokens_per_second": batch * length / median,
    }


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", required=True)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--steps", type=int, default=20, help="timed steps")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--documents", type=int, default=1, help="documents in each sequence")
    parser.add_argument("--compile", action="store_true", help="use torch.compile")
    arguments = parser.parse_args()
    print(json.dumps(measure(load_config(arguments.config), arguments)))


if __name__ == "__main__":
    main()
