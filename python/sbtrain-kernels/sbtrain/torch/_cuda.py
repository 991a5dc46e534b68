"""The ops of _ops.py on a GPU: calls of the C interface, on torch's current stream and with its memory."""
import warnings
from ctypes import c_void_p

import torch

from .. import kernels

_warned = set()


def warn_once(text):
    if text not in _warned:
        _warned.add(text)
        warnings.warn(text, stacklevel=3)


def brain(*tensors):
    """The tensors in bf16, the type of the kernels: f16 is converted, and that is said once."""
    if any(x is not None and x.dtype == torch.float16 for x in tensors):
        warn_once(
            "sbtrain's kernels compute in bfloat16: float16 tensors are converted, and lose 3 bits of their fraction. "
            "Give bfloat16 tensors (torch.autocast(\"cuda\", torch.bfloat16)) to avoid it."
        )
    return [None if x is None else x.to(torch.bfloat16) for x in tensors]


def pointer(x):
    return None if x is None else x.data_ptr()


def row_stride(x):
    """The elements from row to row of x [T, H, d]. The stride of a dimension of size 1 says nothing."""
    return x.stride(0) if x.shape[0] > 1 else x.shape[1] * x.shape[2]


def fits(x):
    """Whether the kernels can read x [T, H, d] where it lies."""
    dense = x.stride(2) == 1 and (x.shape[1] == 1 or x.stride(1) == x.shape[2])
    return dense and row_stride(x) >= x.shape[1] * x.shape[2] and row_stride(x) % 8 == 0 and x.data_ptr() % 16 == 0


def readable(*tensors):
    """The tensors, copied where the kernels cannot read them as they lie."""
    return [x if x.numel() == 0 or fits(x) else x.clone(memory_format=torch.contiguous_format) for x in tensors]


def rows(x):
    return kernels.Rows(x.data_ptr(), row_stride(x))


def dense(x):
    return None if x is None else x.contiguous()


def empty(x, dtype=torch.bfloat16):
    """Memory for what has the shape of x."""
    return torch.empty(x.shape, dtype=dtype, device=x.device)


def pack_fields(q, k, cu_seqlens, max_seqlen, scale):
    """The fields that all passes over a pack have."""
    tokens = q.shape[0]
    if cu_seqlens is not None:
        sequences = cu_seqlens.shape[0] - 1
        max_seqlen = max_seqlen or tokens
    else:
        max_seqlen = max_seqlen or max(tokens, 1)
        sequences = max(tokens // max_seqlen, 1)
    return {
        "device": q.device.index,
        "stream": torch.cuda.current_stream(q.device).cuda_stream,
        "heads": q.shape[1],
        "kv_heads": k.shape[1],
        "head_dim": q.shape[2],
        "tokens": tokens,
        "sequences": sequences,
        "max_seqlen": max(max_seqlen, 1),
        "cu_seqlens": pointer(cu_seqlens),
        "scale": scale,
    }


def run(kind, name, struct, device, backward=None):
    """Calls a function with workspace from torch's allocator."""
    size = kernels.workspace(kind, struct, backward)
    workspace = torch.empty(size, dtype=torch.uint8, device=device)
    struct.workspace, struct.workspace_bytes = workspace.data_ptr(), size
    kernels.call(name, struct)
    return size


def say_cost(q, cu_seqlens, max_seqlen, size):
    """What it costs that the longest document is not known: the workspace is that of a single one."""
    if cu_seqlens is None or max_seqlen or size < (64 << 20):
        return
    warn_once(
        f"sbtrain: cu_seqlens without max_seqlen: the backward pass takes {size >> 20} MiB of workspace, as if the "
        f"{q.shape[0]} tokens were one document. Give max_seqlen, an upper bound of the documents' lengths."
    )


# ---- Stick-breaking ---------------------------------------------------------------------------------------------


def stick_fields(q, k, gate, vector, attend_current, remainder, skip_epsilon, cu_seqlens, max_seqlen, scale):
    return {
        **pack_fields(q, k, cu_seqlens, max_seqlen, scale),
        "attend_current": int(attend_current),
        "remainder": remainder,
        "skip_epsilon": skip_epsilon,
        "gate": pointer(gate),
        "gate_stride": gate.shape[1] if gate is not None else 0,
        "remainder_vector": pointer(vector),
    }


def stickbreaking_forward(
    q, k, v, cu_seqlens, gate, vector, max_seqlen, scale, attend_current, remainder, skip_epsilon
):
    dtype = q.dtype
    q, k, v, vector = brain(q, k, v, vector)
    q, k, v = readable(q, k, v)
    cu_seqlens, gate, vector = dense(cu_seqlens), dense(gate), dense(vector)
    o = empty(q)
    log2_rem = torch.empty(q.shape[1], q.shape[0], dtype=torch.float32, device=q.device)
    stop = torch.empty(q.shape[1], q.shape[0], dtype=torch.int32, device=q.device)
    options = (attend_current, remainder, skip_epsilon, cu_seqlens, max_seqlen, scale)
    x = kernels.StickBreaking(
        **stick_fields(q, k, gate, vector, *options), q=rows(q), k=rows(k), v=rows(v), o=rows(o),
        log2_remainder=pointer(log2_rem), stop=pointer(stop)
    )
    run("stickbreaking", "sbtrain_stickbreaking_forward", x, q.device, False)
    return o.to(dtype), torch.exp2(log2_rem).t().contiguous(), log2_rem, stop


def stickbreaking_backward(
    d_o, d_rem, q, k, v, cu_seqlens, gate, vector, log2_rem, stop, max_seqlen, scale, attend_current, remainder,
    skip_epsilon
):
    dtype = q.dtype
    d_o, q, k, v, vector = brain(d_o, q, k, v, vector)
    d_o, q, k, v = readable(d_o, q, k, v)
    cu_seqlens, gate, vector = dense(cu_seqlens), dense(gate), dense(vector)
    dq, dk, dv = empty(q), empty(k), empty(v)
    d_gate = empty(gate) if gate is not None else q.new_empty(0)
    d_vector = empty(vector, torch.float32) if vector is not None else q.new_empty(0, dtype=torch.float32)
    d_rem = d_rem.float().t().contiguous() if d_rem is not None else None
    options = (attend_current, remainder, skip_epsilon, cu_seqlens, max_seqlen, scale)
    x = kernels.StickBreaking(
        **stick_fields(q, k, gate, vector, *options), q=rows(q), k=rows(k), v=rows(v),
        log2_remainder=pointer(log2_rem), stop=pointer(stop), d_o=rows(d_o), dq=rows(dq), dk=rows(dk), dv=rows(dv),
        d_remainder=pointer(d_rem), d_gate=pointer(d_gate) if gate is not None else None,
        d_gate_stride=gate.shape[1] if gate is not None else 0,
        d_remainder_vector=pointer(d_vector) if vector is not None else None
    )
    say_cost(q, cu_seqlens, max_seqlen, run("stickbreaking", "sbtrain_stickbreaking_backward", x, q.device, True))
    return dq.to(dtype), dk.to(dtype), dv.to(dtype), d_gate.float(), d_vector


# ---- Softmax ----------------------------------------------------------------------------------------------------


def fire_pointers(parameters):
    return kernels.Fire(*(pointer(x) for x in parameters)) if parameters else kernels.Fire()


def softmax_forward(q, k, v, cu_seqlens, fire, bias, max_seqlen, scale, window):
    dtype = q.dtype
    q, k, v = readable(*brain(q, k, v))
    cu_seqlens, fire = dense(cu_seqlens), [dense(x) for x in brain(*fire)]
    o = empty(q)
    lse = torch.empty(q.shape[1], q.shape[0], dtype=torch.float32, device=q.device)
    x = kernels.Softmax(
        **pack_fields(q, k, cu_seqlens, max_seqlen, scale), bias=bias, window=window, fire=fire_pointers(fire),
        q=rows(q), k=rows(k), v=rows(v), o=rows(o), lse=pointer(lse)
    )
    run("softmax", "sbtrain_softmax_forward", x, q.device, False)
    return o.to(dtype), lse


def softmax_backward(d_o, q, k, v, o, lse, cu_seqlens, fire, bias, max_seqlen, scale, window):
    dtype = q.dtype
    d_o, q, k, v, o = readable(*brain(d_o, q, k, v, o))
    dq, dk, dv = empty(q), empty(k), empty(v)
    cu_seqlens, parameters = dense(cu_seqlens), [dense(x) for x in brain(*fire)]
    gradients = [empty(x, torch.float32) for x in parameters[:5]]
    x = kernels.Softmax(
        **pack_fields(q, k, cu_seqlens, max_seqlen, scale), bias=bias, window=window, fire=fire_pointers(parameters),
        q=rows(q), k=rows(k), v=rows(v), o=rows(o), lse=pointer(lse), d_o=rows(d_o), dq=rows(dq), dk=rows(dk),
        dv=rows(dv), d_fire=kernels.FireGradients(*(pointer(x) for x in gradients)) if gradients else kernels.FireGradients()
    )
    run("softmax", "sbtrain_softmax_backward", x, q.device, True)
    return [dq.to(dtype), dk.to(dtype), dv.to(dtype), *gradients]


# ---- Decoding ---------------------------------------------------------------------------------------------------


def decode(name, q, k_cache, v_cache, lengths, scale, vector=None, gate_cache=None, fire=(), **options):
    """q [B, H, d], caches [B, C, G, d]."""
    if not (k_cache.is_contiguous() and v_cache.is_contiguous()):
        raise ValueError("decode: k_cache and v_cache have to be contiguous; they are not copied")
    dtype = q.dtype
    q, vector = brain(q, vector)
    (q,) = readable(q)
    lengths, gate_cache, vector, fire = dense(lengths), dense(gate_cache), dense(vector), [dense(x) for x in brain(*fire)]
    o = empty(q)
    x = kernels.Decode(
        device=q.device.index, stream=c_void_p(torch.cuda.current_stream(q.device).cuda_stream), heads=q.shape[1],
        kv_heads=k_cache.shape[2], head_dim=q.shape[2], scale=scale, batch=q.shape[0], capacity=k_cache.shape[1],
        q=rows(q), o=rows(o), k_cache=pointer(k_cache), v_cache=pointer(v_cache), lengths=pointer(lengths),
        gate_cache=pointer(gate_cache), remainder_vector=pointer(vector), fire=fire_pointers(fire), **options
    )
    run("decode", name, x, q.device)
    return o.to(dtype)
