#!/usr/bin/env python3
"""Times attention in PyTorch on a GPU: the counterpart of `sbtrain bench attention`.

    pytorch_attention.py [--backends cudnn,flash,triton] [--head-dims 32,64,128]
                         [--lengths 512,...,16384] [--tokens 32768] [--width 1536]
                         [--stickbreaking FOLDER] [--against FILE] [--json]

The script times scaled_dot_product_attention on cuDNN and on FlashAttention, and stick-breaking by the
published Triton kernels where the package `stickbreaking_attention` is installed or in FOLDER (default:
$STICKBREAKING_ATTENTION). Shapes, layouts (q, k and v are columns of one matrix), random normal numbers
and the count of operations are those of `sbtrain bench attention`: 4 d L^2 / 2 for each head and sequence
forward, 2.5 times that backward. Several sets of buffers are used alternately, so that none is in the L2
cache when it is used again.

--against takes the output of `sbtrain bench attention --json` and adds how many times faster sbtrain
is, softmax against SDPA and stick-breaking against Triton. Exit status 77: no PyTorch or no GPU.
"""
import argparse
import contextlib
import json
import os
import sys

from pytorch_gpu import fail_unavailable, fla_stickbreaking, published_stickbreaking, sdpa_backend
from pytorch_step import F, torch

COLD_BYTES = 256 << 20


def median(values):
    values = sorted(values)
    return values[len(values) // 2]


def time_calls(calls, repeats):
    """Median seconds of calls[n % len(calls)](), enqueued without waiting in between."""
    for call in calls:
        call()
    events = []
    for n in range(repeats):
        begin = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        begin.record()
        calls[n % len(calls)]()
        end.record()
        events.append((begin, end))
    torch.cuda.synchronize()
    return median(1e-3 * begin.elapsed_time(end) for begin, end in events)


def measure(attend, tokens, width, head_dim, length, repeats):
    batch, heads = tokens // length, width // head_dim
    bytes_of_set = 2 * 8 * tokens * width
    sets = []
    for _ in range(min(64, COLD_BYTES // bytes_of_set + 2)):
        shape = (batch, length, 3, heads, head_dim)
        qkv = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        qkv = [part.transpose(1, 2).detach().requires_grad_() for part in qkv.unbind(2)]
        do = torch.randn(batch, length, heads, head_dim, device="cuda", dtype=torch.bfloat16)
        sets.append((qkv, do.transpose(1, 2)))
    forward = time_calls([lambda x=x: attend(*x[0]) for x in sets], repeats)
    outputs = [(attend(*qkv), qkv, do) for qkv, do in sets]
    backward = time_calls(
        [lambda x=x: torch.autograd.grad(x[0], x[1], x[2], retain_graph=True) for x in outputs],
        repeats,
    )
    return forward, backward


def attentions(arguments):
    """Yields name, the module of sbtrain to compare with, the context to run in, and the function."""

    def sdpa(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    for name in arguments.backends.split(","):
        if name in ("cudnn", "flash"):
            yield name, "softmax", lambda name=name: sdpa_backend(name), sdpa
        elif name == "triton":
            choice = arguments.stickbreaking
            kernel, why = fla_stickbreaking() if choice == "fla" else published_stickbreaking(choice)
            if kernel is None:
                print(f"triton: not available ({why})", file=sys.stderr)
                continue

            def triton(q, k, v):
                return kernel(q, k, v, inv_temp=q.shape[-1] ** -0.5)[0]

            yield name, "stickbreaking", contextlib.nullcontext, triton
        else:
            sys.exit(f"pytorch_attention: '{name}' is not one of cudnn, flash, triton")


def read_against(path):
    if not path:
        return {}
    with open(path) as file:
        rows = [json.loads(line) for line in file if line.startswith("{")]
    return {(row["module"], row["head_dim"], row["length"]): row for row in rows}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backends", default="cudnn,flash,triton")
    parser.add_argument("--head-dims", default="32,64,128")
    parser.add_argument("--lengths", default="512,1024,2048,4096,8192,16384")
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--width", type=int, default=1536)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--stickbreaking", default=os.environ.get("STICKBREAKING_ATTENTION", ""))
    parser.add_argument("--against", default="", metavar="FILE")
    parser.add_argument("--json", action="store_true", help="one JSON object a row")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        fail_unavailable("a CUDA device")
    against = read_against(arguments.against)
    if not arguments.json:
        print(f"{'backend':<16}{'d':>6}{'L':>8}{'forward ms':>13}{'TFLOP/s':>9}"
              f"{'backward ms':>14}{'TFLOP/s':>9}"
              + (f"{'sbtrain is faster by':>30}" if against else ""))  # fmt: skip
    for name, module, context, attend in attentions(arguments):
        for head_dim in map(int, arguments.head_dims.split(",")):
            for length in map(int, arguments.lengths.split(",")):
                try:
                    with context():
                        forward, backward = measure(
                            attend, arguments.tokens, arguments.width, head_dim, length,
                            arguments.repeats,
                        )  # fmt: skip
                except (Exception if name == "triton" else RuntimeError) as error:
                    # No kernel for the shape, or not enough memory; Triton has errors of its own.
                    reason = str(error).strip().splitlines() or [type(error).__name__]
                    print(f"{name}, d {head_dim}, L {length}: {reason[0]}", file=sys.stderr)
                    continue
                flops = 2.0 * arguments.width * length * arguments.tokens
                row = {
                    "backend": name, "head_dim": head_dim, "length": length,
                    "forward_seconds": forward, "backward_seconds": backward,
                    "forward_flops": flops / forward, "backward_flops": 2.5 * flops / backward,
                }  # fmt: skip
                text = (f"{name:<16}{head_dim:>6}{length:>8}{1e3 * forward:>13.3f}"
                        f"{flops / forward / 1e12:>9.3g}{1e3 * backward:>14.3f}"
                        f"{2.5 * flops / backward / 1e12:>9.3g}")  # fmt: skip
                own = against.get((module, head_dim, length))
                if own:
                    row["forward_ratio"] = forward / own["forward_seconds"]
                    row["backward_ratio"] = backward / own["backward_seconds"]
                    text += f"{row['forward_ratio']:>14.2f}x {row['backward_ratio']:>13.2f}x"
                print(json.dumps(row) if arguments.json else text, flush=True)


if __name__ == "__main__":
    main()
