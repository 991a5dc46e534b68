#!/usr/bin/env python3
"""Times one training step of a configuration in PyTorch with FSDP2, on several GPUs of one machine.

    torchrun --nproc-per-node 2 tests/bench/pytorch_fsdp2.py --config configs/1b_rope.yaml --batch 8

The counterpart of `sbtrain bench train --gpus N`: the model (without muP's factors), the loss and the optimizer of
pytorch_gpu.py, with every block sharded by fully_shard: f32 masters and moments, gathered and computed
in bf16, gradients reduced in f32, fused AdamW, global-norm clipping, cuDNN's attention, blocks compiled
by torch.compile. --batch is the number of sequences of each GPU, which are one micro-batch.
Stick-breaking runs on the Triton kernels of flash-linear-attention (packages fla-core and einops).

--mode full frees the weights of a block after its use (ZeRO-3), grad keeps them from the forward to the
backward pass (ZeRO-2). --recompute full keeps only the inputs of blocks (activation checkpointing).

Rank 0 prints one line of JSON: the median and the quartiles of a step in seconds, each step as long as on
its slowest rank; tokens per second of each GPU and of all; and the peak memory of the fullest GPU.
Exit status 77 means that something is missing. --device cpu runs the same code without GPUs, by gloo, as
a check; stick-breaking is then its formula, with L x L matrices.
"""
import argparse
import json
import math
import sys
import time

from pytorch_gpu import Llama, fail_unavailable, load_flat, make_optimizer, nn, sdpa_backend
from pytorch_step import F, load_config, torch

try:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.utils.checkpoint import checkpoint
except ImportError as error:
    fail_unavailable(f"FSDP2 ({error}); PyTorch 2.6 has it")

# Defaults of docs/config.md.
MODEL = {
    "layers": 4, "width": 128, "inner": 344, "heads": 4, "vocab": 4096, "tied": True,
    "norm_eps": 1e-5, "init_std": 0.02, "attention": {"type": "stickbreaking"},
}  # fmt: skip


def triton_stickbreaking():
    """attend(q, k, v, scale) of [B, H, L, d] tensors, by flash-linear-attention."""
    try:
        from fla.ops.stickbreaking_attn import parallel_stickbreaking_attn
    except ImportError as error:
        fail_unavailable(f"the Triton kernels of flash-linear-attention ({error})")

    # torch.compile must leave it as it is, since the kernels are compiled by Triton already.
    @torch.compiler.disable
    def attend(q, k, v, scale):
        q, k, v = (x.transpose(1, 2).contiguous() for x in (q, k, v))
        return parallel_stickbreaking_attn(q, k, v, scale=scale)[0].transpose(1, 2)

    return attend


def formula_stickbreaking(q, k, v, scale):
    length = q.shape[-2]
    seen = torch.ones(length, length, dtype=torch.bool, device=q.device).tril(-1)
    z = scale * (q @ k.transpose(-1, -2)).float()
    log_keep = F.logsigmoid(-z)
    summed = log_keep.masked_fill(~seen, 0.0).cumsum(-1)
    a = torch.exp((z + log_keep + summed[..., -1:] - summed).masked_fill(~seen, -math.inf))
    return a.to(v.dtype) @ v


class Checkpointed(nn.Module):
    """A block of which only the input is kept."""

    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, *inputs):
        return checkpoint(self.block, *inputs, use_reentrant=False)


def attention_of(model, choice):
    if choice == "config":
        return model["attention"]
    types = {"softmax": {"type": "softmax", "position": "rope"}, "sb": {"type": "stickbreaking"}}
    return types[choice]


def build(model, length, arguments, mesh):
    modules = model["attention"]
    modules = [modules] if isinstance(modules, dict) else modules
    stickbreaking = None
    if any(options.get("type", "stickbreaking") != "softmax" for options in modules):
        on_gpu = arguments.device == "cuda"
        stickbreaking = triton_stickbreaking() if on_gpu else formula_stickbreaking
    torch.manual_seed(1)  # every rank draws the same weights
    with torch.device(arguments.device):
        network = Llama(model, length, stickbreaking)
    if arguments.recompute == "full":
        network.blocks = nn.ModuleList(Checkpointed(block) for block in network.blocks)
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16,
        reduce_dtype=torch.bfloat16 if arguments.reduce_dtype == "bfloat16" else torch.float32,
        cast_forward_inputs=False,  # the angles of rotary positions stay f32
    )
    for block in network.blocks:
        if arguments.compile:
            block.compile()
        reshard = arguments.mode == "full"
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(network, mesh=mesh, mp_policy=policy)
    return network


def measure(config, arguments):
    model = {**MODEL, **config.get("model", {})}
    model["norm_eps"] = float(model["norm_eps"])
    model["attention"] = attention_of(model, arguments.attention)
    train = config.get("train", {})
    length = arguments.length or train.get("sequence_length", 256)
    batch = arguments.batch or train.get("micro_batch", 4)
    clip = train.get("clip", 1.0)
    cuda = arguments.device == "cuda"
    mesh = init_device_mesh(arguments.device, (dist.get_world_size(),))
    network = build(model, length, arguments, mesh)
    optimizer = make_optimizer(network, train, cuda)
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    generator = torch.Generator(arguments.device).manual_seed(1 + dist.get_rank())

    def step():
        tokens = torch.randint(
            model["vocab"], (batch, length + 1), device=arguments.device, generator=generator
        )
        if cuda:
            torch.cuda.synchronize()
        dist.barrier()
        begin = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        loss = network(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(network.parameters(), clip)
        optimizer.step()
        if cuda:
            torch.cuda.synchronize()
        seconds = torch.tensor(time.perf_counter() - begin, device=arguments.device)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        if not math.isfinite(loss.item()):
            sys.exit("pytorch_fsdp2: the loss is not finite")
        return seconds.item(), loss.item()

    with sdpa_backend(arguments.sdpa if cuda else "any"):
        first_loss = step()[1]
        for _ in range(arguments.warmup - 1):
            step()
        timed = [step() for _ in range(arguments.steps)]
    times = sorted(seconds for seconds, _ in timed)
    median = times[len(times) // 2]
    memory = torch.tensor(
        torch.cuda.max_memory_reserved() if cuda else 0, device=arguments.device, dtype=torch.int64
    )
    dist.all_reduce(memory, dist.ReduceOp.MAX)
    world = dist.get_world_size()
    return {
        "framework": f"PyTorch {torch.__version__} FSDP2" + (" compiled" if arguments.compile else ""),
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "world": world,
        "mode": arguments.mode,
        "recompute": arguments.recompute,
        "parameters": sum(w.numel() for w in network.parameters()),
        "tokens_per_step": world * batch * length,
        "steps": len(times),
        "step_seconds": median,
        "step_seconds_quartiles": [times[len(times) // 4], times[3 * len(times) // 4]],
        "tokens_per_second": world * batch * length / median,
        "tokens_per_second_per_gpu": batch * length / median,
        "memory_bytes": memory.item(),
        "losses": [first_loss, timed[-1][1]],
    }


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", required=True)
    parser.add_argument("--batch", type=int, default=0, help="sequences of each GPU in a step")
    parser.add_argument("--length", type=int, default=0, help="tokens of a sequence")
    parser.add_argument("--steps", type=int, default=20, help="timed steps")
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--attention", default="config", choices=["config", "softmax", "sb"])
    parser.add_argument("--mode", default="full", choices=["full", "grad"])
    parser.add_argument("--reduce-dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--recompute", default="none", choices=["none", "full"])
    parser.add_argument("--sdpa", default="cudnn", choices=["cudnn", "flash", "any"])
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    arguments = parser.parse_args()
    cuda = arguments.device == "cuda"
    if cuda and not torch.cuda.is_available():
        fail_unavailable("a CUDA device")
    dist.init_process_group("nccl" if cuda else "gloo")
    if cuda:
        torch.cuda.set_device(dist.get_node_local_rank())
    load = load_flat if arguments.config.endswith(".flat") else load_config
    result = measure(load(arguments.config), arguments)
    if dist.get_rank() == 0:
        print(json.dumps(result), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
