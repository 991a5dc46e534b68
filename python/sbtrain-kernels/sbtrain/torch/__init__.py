"""sbtrain's attention kernels in PyTorch: stick-breaking attention, and softmax attention that is deterministic.

    from sbtrain.torch import stickbreaking_attention
    o, rem = stickbreaking_attention(q, k, v)  # q [B, T, H, d], k and v [B, T, G, d]

On a GPU the kernels of libsbtrain_attention.so compute, on a CPU torch's own operations, in float32 and for trials.
The calls work in eager mode, in torch.compile and torch.autocast, in CUDA graphs and in checkpointed layers.
Importing this needs neither GPU nor driver. sbtrain.torch.transformers and sbtrain.torch.fla put the kernels into the
models of those libraries.
"""
import torch

if not hasattr(torch.library, "custom_op"):
    raise ImportError(f"sbtrain.torch needs PyTorch 2.4 or later; this is {torch.__version__}")

from ._attention import (  # noqa: E402
    SKIP_EPSILON,
    Fire,
    softmax_attention,
    softmax_decode,
    stickbreaking_attention,
    stickbreaking_decode,
)

__all__ = [
    "SKIP_EPSILON",
    "Fire",
    "softmax_attention",
    "softmax_decode",
    "stickbreaking_attention",
    "stickbreaking_decode",
]
