#!/usr/bin/env python3
"""Times sbtrain's op in PyTorch on a GPU, beside flash-linear-attention's kernel.

    pytorch_op.py [--parts kernels,overhead,model] [--head-dims 64,128] [--lengths 2048,4096,16384] [--tokens 32768]
                  [--width 1536] [--batch 4] [--steps 10] [--json] [--device cpu]

kernels   stickbreaking_attention and parallel_stickbreaking_attn, forward and backward, on the same random numbers;
          TFLOP/s count 4 d L^2 / 2 for each head and sequence forward, 2.5 times that backward. Random logits use sticks
          up soon, so sbtrain's skipping is off.
overhead  microseconds that the host takes for a call, forward and with its backward pass, on a pack so small that the GPU
          does not matter; and of a step that is replayed as a CUDA graph.
model     tokens per second of a step (forward, backward, no optimizer) of flash-linear-attention's
          StickBreakingAttentionForCausalLM in the shape of configs/1b_sb.yaml, before and after patch().

SBTRAIN_ATTENTION_LIBRARY names the library where the wheel sbtrain-kernels is not installed. What is not installed is left
out with a message. --device cpu runs the code on tiny shapes, as a check. Exit status 77: no PyTorch or no GPU.
"""
import argparse
import json
import pathlib
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "python/sbtrain-kernels"))  # behind an installed wheel
from pytorch_attention import time_calls  # noqa: E402
from pytorch_gpu import fail_unavailable  # noqa: E402
from pytorch_step import torch  # noqa: E402

import sbtrain.torch.fla  # noqa: E402
from sbtrain.torch import stickbreaking_attention  # noqa: E402

COLD_BYTES = 256 << 20
MODEL_1B = {
    "hidden_size": 1536, "num_hidden_layers": 40, "num_heads": 24, "intermediate_size": 4096, "vocab_size": 49152,
    "tie_word_embeddings": True, "use_cache": False,
}
TINY = {"hidden_size": 32, "num_hidden_layers": 1, "num_heads": 2, "intermediate_size": 48, "vocab_size": 64}


def fla_kernel():
    """flash-linear-attention's function, or None with a message."""
    try:
        from fla.ops.stickbreaking_attn import parallel_stickbreaking_attn
    except (ImportError, RuntimeError) as error:
        print(f"flash-linear-attention: not available ({error})", file=sys.stderr)
        return None
    return parallel_stickbreaking_attn


def ours(q, k, v):
    return stickbreaking_attention(q, k, v, skip_epsilon=0.0)[0]


def seconds_of(calls, arguments):
    """Median seconds of a call."""
    if arguments.device == "cuda":
        return time_calls(calls, arguments.steps)
    begin = time.perf_counter()
    for call in calls:
        call()
    return (time.perf_counter() - begin) / len(calls)


def inputs(arguments, head_dim, length):
    """Sets of q, k, v and do, so many that none is in the L2 cache when it is used again."""
    shape = (arguments.tokens // length, length, arguments.width // head_dim, head_dim)
    count = min(64, COLD_BYTES // (8 * arguments.tokens * arguments.width) + 2) if arguments.device == "cuda" else 1
    options = {"device": arguments.device, "dtype": torch.bfloat16}
    return [[torch.randn(shape, **options).requires_grad_(i < 3) for i in range(4)] for _ in range(count)]


def kernels(arguments):
    original = fla_kernel()
    functions = {"sbtrain": ours}
    if original is not None and arguments.device == "cuda":
        functions["fla"] = lambda q, k, v: original(q, k, v)[0]
    for head_dim in arguments.head_dims:
        for length in arguments.lengths:
            sets = inputs(arguments, head_dim, length)
            flops = 2 * arguments.width * length * arguments.tokens
            for name, function in functions.items():
                forward = seconds_of([lambda x=x: function(*x[:3]) for x in sets], arguments)
                outputs = [(function(*x[:3]), x) for x in sets]
                backward = seconds_of(
                    [lambda o=o, x=x: torch.autograd.grad(o, x[:3], x[3], retain_graph=True) for o, x in outputs], arguments
                )
                yield {
                    "part": "kernels", "name": name, "d": head_dim, "L": length, "forward_ms": 1e3 * forward,
                    "forward_tflops": 1e-12 * flops / forward, "backward_ms": 1e3 * backward,
                    "backward_tflops": 2.5e-12 * flops / backward,
                }


def host_seconds(call, repeats):
    """Seconds of the host for a call, without waiting for the device."""
    for _ in range(10):
        call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(repeats):
        call()
    seconds = (time.perf_counter() - begin) / repeats
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return seconds


def overhead(arguments):
    q, k, v = (torch.randn(1, 128, 4, 64, device=arguments.device, dtype=torch.bfloat16).requires_grad_() for _ in range(3))
    original = fla_kernel() if arguments.device == "cuda" else None
    functions = {"sbtrain": ours, "fla": original and (lambda *x: original(*x)[0])}
    for name, function in functions.items():
        if function is None:
            continue

        def step():
            torch.autograd.grad(function(q, k, v).sum(), (q, k, v))

        with torch.no_grad():
            forward = host_seconds(lambda: function(q, k, v), 200)
        row = {"part": "overhead", "name": name, "forward_us": 1e6 * forward, "step_us": 1e6 * host_seconds(step, 200)}
        if arguments.device == "cuda":
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step()
            row["graph_us"] = 1e6 * host_seconds(graph.replay, 200)
        yield row


def model(arguments):
    if fla_kernel() is None:
        return
    from fla.models import StickBreakingAttentionConfig, StickBreakingAttentionForCausalLM

    on_gpu = arguments.device == "cuda"
    if not on_gpu:
        print("model: its layers refuse to run without a GPU", file=sys.stderr)
    config = StickBreakingAttentionConfig(**(MODEL_1B if on_gpu else TINY))
    network = StickBreakingAttentionForCausalLM(config).to(arguments.device, torch.bfloat16)
    length = 4096 if on_gpu else 16
    ids = torch.randint(config.vocab_size, (arguments.batch, length), device=arguments.device)
    if not on_gpu:
        return

    def step():
        network.zero_grad(set_to_none=True)
        network(input_ids=ids, labels=ids).loss.backward()

    for name, change in (("fla", sbtrain.torch.fla.unpatch), ("sbtrain", sbtrain.torch.fla.patch)):
        change()
        for _ in range(3):
            step()
        seconds = time_calls([step], arguments.steps)
        yield {
            "part": "model", "name": name, "tokens": ids.numel(), "step_ms": 1e3 * seconds,
            "tokens_per_second": ids.numel() / seconds, "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        }
        torch.cuda.reset_peak_memory_stats()
    sbtrain.torch.fla.unpatch()


def show(row):
    numbers = [f"{key} {value:.1f}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items()]
    return "  ".join(x.removeprefix("part ").removeprefix("name ").ljust(12) for x in numbers)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="kernels,overhead,model")
    parser.add_argument("--head-dims", default="64,128")
    parser.add_argument("--lengths", default="2048,4096,16384")
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--width", type=int, default=1536)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--json", action="store_true", help="one JSON object a row")
    arguments = parser.parse_args()
    arguments.head_dims = [int(x) for x in arguments.head_dims.split(",")]
    arguments.lengths = [int(x) for x in arguments.lengths.split(",")]
    if arguments.device == "cpu":
        arguments.tokens, arguments.width, arguments.lengths = 64, 128, [32]
    elif not torch.cuda.is_available():
        fail_unavailable("a CUDA device")
    parts = {"kernels": kernels, "overhead": overhead, "model": model}
    for name in arguments.parts.split(","):
        if name not in parts:
            sys.exit(f"pytorch_op: '{name}' is not one of {', '.join(parts)}")
        for row in parts[name](arguments):
            print(json.dumps(row) if arguments.json else show(row), flush=True)


if __name__ == "__main__":
    main()
