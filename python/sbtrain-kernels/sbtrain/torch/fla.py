"""flash-linear-attention's stick-breaking attention by sbtrain's kernels:

    import sbtrain.torch.fla
    sbtrain.torch.fla.patch()
    model = StickBreakingAttentionForCausalLM.from_pretrained(...)

patch() replaces parallel_stickbreaking_attn of flash-linear-attention 0.6 in all of its modules by a function of the
same signature and results; unpatch() takes that back.
"""
import importlib
import sys
import weakref
from typing import Optional, Tuple

import torch
import torch.nn.functional as F

from ._attention import MAX_HEAD_DIM, stickbreaking_attention

FUNCTION = "parallel_stickbreaking_attn"
_original = None


def to_channels(x, d):
    return F.pad(x, (0, d - x.shape[-1])) if x.shape[-1] < d else x


class _Longest:
    """The longest document of the last cu_seqlens, which a model gives to all of its layers: flash-linear-attention
    reads cu_seqlens on the host once too. None while that is not possible."""

    def __init__(self):
        self.of, self.version, self.value = lambda: None, 0, None

    def __call__(self, cu_seqlens):
        if cu_seqlens is None or torch.compiler.is_compiling():
            return None
        if cu_seqlens.is_cuda and torch.cuda.is_current_stream_capturing():
            return None
        if self.of() is not cu_seqlens or self.version != cu_seqlens._version:
            self.value = int(cu_seqlens.diff().max())
            self.of, self.version = weakref.ref(cu_seqlens), cu_seqlens._version
        return self.value


_longest = _Longest()


def parallel_stickbreaking_attn(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scale: Optional[float] = None,
    attend_current: bool = False,
    cu_seqlens: Optional[torch.Tensor] = None,
) -> Tuple[torch.Tensor, torch.Tensor]:
    """o [B, T, HQ, V] and rem [B, T, HQ], both of q's type, of q [B, T, HQ, K], k [B, T, H, K] and v [B, T, H, V].
    Where K and V differ, or are no multiple of 8, channels of zeros are added, which changes no result."""
    if q.shape[:2] != k.shape[:2] or k.shape[:3] != v.shape[:3] or q.shape[-1] != k.shape[-1]:
        raise ValueError(
            f"Expected q, k and v of shapes [B, T, HQ, K], [B, T, H, K] and [B, T, H, V], "
            f"got {tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}."
        )
    scale = k.shape[-1] ** -0.5 if scale is None else scale
    d = (max(k.shape[-1], v.shape[-1]) + 7) // 8 * 8
    if d > MAX_HEAD_DIM:
        raise ValueError(f"Heads of {max(k.shape[-1], v.shape[-1])} channels; at most {MAX_HEAD_DIM} are possible.")
    o, rem = stickbreaking_attention(
        *(to_channels(x, d) for x in (q, k, v)), scale=scale, attend_current=attend_current, cu_seqlens=cu_seqlens,
        max_seqlen=_longest(cu_seqlens)
    )
    return o[..., : v.shape[-1]], rem.to(q.dtype)


def _replace(old, new):
    for name, module in list(sys.modules.items()):
        if (name == "fla" or name.startswith("fla.")) and getattr(module, FUNCTION, None) is old:
            setattr(module, FUNCTION, new)


def patch():
    """Replaces the function in all modules of flash-linear-attention. Its ops have to be installed (fla-core), layers and
    models (flash-linear-attention) need not be."""
    global _original
    if _original is not None:
        return
    original = getattr(importlib.import_module("fla.ops.stickbreaking_attn"), FUNCTION)
    try:
        importlib.import_module("fla.layers.stickbreaking_attn")
    except ModuleNotFoundError as error:  # fla-core has the function without layers and models
        if error.name not in ("fla.layers", "fla.layers.stickbreaking_attn"):
            raise
    _original = original
    _replace(original, parallel_stickbreaking_attn)


def unpatch():
    """Puts the function back."""
    global _original
    if _original is not None:
        _replace(parallel_stickbreaking_attn, _original)
        _original = None
