"""The ops sbtrain::... of torch.library over packs: their types, their kernels on CPUs and GPUs, their shapes for
tracing, and their gradients. _attention.py has what users call.

Shapes: q and o [T, H, d], k and v [T, G, d], gate [T, H] f32, rem [T, H] f32; cu_seqlens [N + 1] i32 or None, and then
all documents have max_seqlen tokens. max_seqlen 0: not known. log2_rem [H, T] and stop [H, T] are what the backward
pass reads. In place of a gradient that is not asked for there is an empty tensor.
"""
from typing import List, Optional, Tuple

import torch
from torch import Tensor

from . import _cuda, _formulas
from ._formulas import documents, exact, heads_of, sum_groups


def no_grad_of(x, count=1):
    return [x.new_empty(0) for _ in range(count)]


# ---- Stick-breaking ---------------------------------------------------------------------------------------------


@torch.library.custom_op("sbtrain::stickbreaking_forward", mutates_args=(), device_types="cuda")
def stickbreaking_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Optional[Tensor],
    gate: Optional[Tensor],
    remainder_vector: Optional[Tensor],
    max_seqlen: int,
    scale: float,
    attend_current: bool,
    remainder: int,
    skip_epsilon: float,
) -> Tuple[Tensor, Tensor, Tensor, Tensor]:
    return _cuda.stickbreaking_forward(
        q, k, v, cu_seqlens, gate, remainder_vector, max_seqlen, scale, attend_current, remainder, skip_epsilon
    )


@torch.library.custom_op("sbtrain::stickbreaking_backward", mutates_args=(), device_types="cuda")
def stickbreaking_backward(
    d_o: Tensor,
    d_rem: Optional[Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Optional[Tensor],
    gate: Optional[Tensor],
    remainder_vector: Optional[Tensor],
    log2_rem: Tensor,
    stop: Tensor,
    max_seqlen: int,
    scale: float,
    attend_current: bool,
    remainder: int,
    skip_epsilon: float,
) -> Tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return _cuda.stickbreaking_backward(
        d_o, d_rem, q, k, v, cu_seqlens, gate, remainder_vector, log2_rem, stop, max_seqlen, scale, attend_current,
        remainder, skip_epsilon
    )


@stickbreaking_forward.register_kernel("cpu")
def _(q, k, v, cu_seqlens, gate, remainder_vector, max_seqlen, scale, attend_current, remainder, skip_epsilon):
    tokens, heads, _ = q.shape
    dtype = exact(q.dtype)
    o = torch.zeros(q.shape, dtype=dtype)
    log_rem = torch.zeros(heads, tokens, dtype=dtype)
    for begin, end in documents(tokens, max_seqlen or tokens, cu_seqlens):
        qkv = [heads_of(x, begin, end, heads, dtype) for x in (q, k, v)]
        f = heads_of(gate[..., None], begin, end, heads, dtype)[..., 0] if gate is not None else None
        y, left = _formulas.stickbreaking_document(*qkv, f, remainder_vector, scale, attend_current, remainder)
        o[begin:end], log_rem[:, begin:end] = y.transpose(0, 1), left
    log2_rem = log_rem / torch.log(torch.tensor(2.0, dtype=dtype))
    stop = torch.zeros(heads, tokens, dtype=torch.int32)
    return o.to(q.dtype), log_rem.exp().t().contiguous(), log2_rem, stop


@stickbreaking_backward.register_kernel("cpu")
def _(
    d_o, d_rem, q, k, v, cu_seqlens, gate, remainder_vector, log2_rem, stop, max_seqlen, scale, attend_current,
    remainder, skip_epsilon
):
    tokens, heads, _ = q.shape
    groups, dtype = k.shape[1], exact(q.dtype)
    dq, dk, dv = (torch.zeros(x.shape, dtype=dtype) for x in (q, k, v))
    d_gate = torch.zeros(gate.shape, dtype=dtype) if gate is not None else q.new_empty(0, dtype=dtype)
    d_vector = torch.zeros(remainder_vector.shape if remainder == 2 else 0, dtype=dtype)
    d_rem = d_rem if d_rem is not None else torch.zeros(tokens, heads)
    for begin, end in documents(tokens, max_seqlen or tokens, cu_seqlens):
        given = [heads_of(x, begin, end, heads, dtype) for x in (d_o, q, k, v)]
        d_left = d_rem[begin:end].to(dtype).t()
        f = heads_of(gate[..., None], begin, end, heads, dtype)[..., 0] if gate is not None else None
        a, b, c, of_gate, of_vector = _formulas.stickbreaking_document_backward(
            given[0], d_left, *given[1:], f, remainder_vector, scale, attend_current, remainder
        )
        dq[begin:end] = a.transpose(0, 1)
        dk[begin:end], dv[begin:end] = sum_groups(b, groups), sum_groups(c, groups)
        if gate is not None:
            d_gate[begin:end] = of_gate.t()
        if remainder == 2:
            d_vector += of_vector
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), d_gate, d_vector


@stickbreaking_forward.register_fake
def _(q, k, v, cu_seqlens, gate, remainder_vector, max_seqlen, scale, attend_current, remainder, skip_epsilon):
    tokens, heads, _ = q.shape
    dtype = exact(q.dtype)
    left = q.new_empty(heads, tokens, dtype=dtype)
    return q.new_empty(q.shape), q.new_empty(tokens, heads, dtype=dtype), left, left.new_empty(left.shape, dtype=torch.int32)


@stickbreaking_backward.register_fake
def _(
    d_o, d_rem, q, k, v, cu_seqlens, gate, remainder_vector, log2_rem, stop, max_seqlen, scale, attend_current,
    remainder, skip_epsilon
):
    dtype = exact(q.dtype)
    d_gate = gate.new_empty(gate.shape, dtype=dtype) if gate is not None else q.new_empty(0, dtype=dtype)
    d_vector = q.new_empty(remainder_vector.shape if remainder_vector is not None else 0, dtype=dtype)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), d_gate, d_vector


def _stickbreaking_setup(ctx, inputs, output):
    q, k, v, cu_seqlens, gate, remainder_vector, *options = inputs
    ctx.set_materialize_grads(False)  # a remainder that nobody uses costs nothing
    ctx.save_for_backward(q, k, v, cu_seqlens, gate, remainder_vector, *output[2:])
    ctx.options = options


def _stickbreaking_backward(ctx, d_o, d_rem, d_log2_rem, d_stop):
    q, k, v, cu_seqlens, gate, remainder_vector, log2_rem, stop = ctx.saved_tensors
    if d_o is None and d_rem is None:
        return (None,) * 11
    d_o = torch.zeros_like(q) if d_o is None else d_o
    dq, dk, dv, d_gate, d_vector = stickbreaking_backward(
        d_o, d_rem, q, k, v, cu_seqlens, gate, remainder_vector, log2_rem, stop, *ctx.options
    )
    d_gate = d_gate.to(gate.dtype) if gate is not None else None
    d_vector = d_vector.to(remainder_vector.dtype) if remainder_vector is not None else None
    return dq, dk, dv, None, d_gate, d_vector, None, None, None, None, None


torch.library.register_autograd(
    "sbtrain::stickbreaking_forward", _stickbreaking_backward, setup_context=_stickbreaking_setup
)


# ---- Softmax ----------------------------------------------------------------------------------------------------


@torch.library.custom_op("sbtrain::softmax_forward", mutates_args=(), device_types="cuda")
def softmax_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Optional[Tensor],
    fire: List[Tensor],
    bias: int,
    max_seqlen: int,
    scale: float,
    window: int,
) -> Tuple[Tensor, Tensor]:
    return _cuda.softmax_forward(q, k, v, cu_seqlens, fire, bias, max_seqlen, scale, window)


@torch.library.custom_op("sbtrain::softmax_backward", mutates_args=(), device_types="cuda")
def softmax_backward(
    d_o: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    cu_seqlens: Optional[Tensor],
    fire: List[Tensor],
    bias: int,
    max_seqlen: int,
    scale: float,
    window: int,
) -> List[Tensor]:
    return _cuda.softmax_backward(d_o, q, k, v, o, lse, cu_seqlens, fire, bias, max_seqlen, scale, window)


@softmax_forward.register_kernel("cpu")
def _(q, k, v, cu_seqlens, fire, bias, max_seqlen, scale, window):
    tokens, heads, _ = q.shape
    dtype = exact(q.dtype)
    o, lse = torch.zeros(q.shape, dtype=dtype), torch.zeros(heads, tokens, dtype=dtype)
    for begin, end in documents(tokens, max_seqlen or tokens, cu_seqlens):
        qkv = [heads_of(x, begin, end, heads, dtype) for x in (q, k, v)]
        y, lse[:, begin:end] = _formulas.softmax_document(*qkv, bias, fire, scale, window)
        o[begin:end] = y.transpose(0, 1)
    return o.to(q.dtype), lse


@softmax_backward.register_kernel("cpu")
def _(d_o, q, k, v, o, lse, cu_seqlens, fire, bias, max_seqlen, scale, window):
    tokens, heads, _ = q.shape
    groups, dtype = k.shape[1], exact(q.dtype)
    dq, dk, dv = (torch.zeros(x.shape, dtype=dtype) for x in (q, k, v))
    d_fire = [torch.zeros(x.shape, dtype=dtype) for x in fire[:5]]
    for begin, end in documents(tokens, max_seqlen or tokens, cu_seqlens):
        given = [heads_of(x, begin, end, heads, dtype) for x in (d_o, q, k, v)]
        a, b, c, gradients = _formulas.softmax_document_backward(*given, bias, fire, scale, window)
        dq[begin:end] = a.transpose(0, 1)
        dk[begin:end], dv[begin:end] = sum_groups(b, groups), sum_groups(c, groups)
        for total, part in zip(d_fire, gradients or ()):
            total += part.reshape(total.shape)
    return [dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), *d_fire]


@softmax_forward.register_fake
def _(q, k, v, cu_seqlens, fire, bias, max_seqlen, scale, window):
    return q.new_empty(q.shape), q.new_empty(q.shape[1], q.shape[0], dtype=exact(q.dtype))


@softmax_backward.register_fake
def _(d_o, q, k, v, o, lse, cu_seqlens, fire, bias, max_seqlen, scale, window):
    parameters = [x.new_empty(x.shape, dtype=exact(q.dtype)) for x in fire[:5]]
    return [q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), *parameters]


def _softmax_setup(ctx, inputs, output):
    q, k, v, cu_seqlens, fire, *options = inputs
    ctx.save_for_backward(q, k, v, *output, cu_seqlens, *fire)
    ctx.options = options


def _softmax_backward(ctx, d_o, d_lse):
    q, k, v, o, lse, cu_seqlens, *fire = ctx.saved_tensors
    dq, dk, dv, *d_fire = softmax_backward(d_o, q, k, v, o, lse, cu_seqlens, fire, *ctx.options)
    d_fire = [d.to(x.dtype) for d, x in zip(d_fire, fire)]
    if fire:
        d_fire.append(torch.zeros_like(fire[5]))  # b2 shifts all logits of a query alike
    return dq, dk, dv, None, d_fire, None, None, None, None


torch.library.register_autograd("sbtrain::softmax_forward", _softmax_backward, setup_context=_softmax_setup)


# ---- Decoding: without gradients --------------------------------------------------------------------------------


@torch.library.custom_op("sbtrain::stickbreaking_decode", mutates_args=(), device_types="cuda")
def stickbreaking_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    gate_cache: Optional[Tensor],
    remainder_vector: Optional[Tensor],
    scale: float,
    attend_current: bool,
    remainder: int,
    skip_epsilon: float,
) -> Tensor:
    return _cuda.decode(
        "sbtrain_stickbreaking_decode", q, k_cache, v_cache, lengths, scale, vector=remainder_vector,
        gate_cache=gate_cache, attend_current=int(attend_current), remainder=remainder, skip_epsilon=skip_epsilon
    )


@torch.library.custom_op("sbtrain::softmax_decode", mutates_args=(), device_types="cuda")
def softmax_decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: Tensor,
    fire: List[Tensor],
    bias: int,
    scale: float,
    window: int,
) -> Tensor:
    return _cuda.decode(
        "sbtrain_softmax_decode", q, k_cache, v_cache, lengths, scale, fire=fire, bias=bias, window=window
    )


def _cached_documents(q, k_cache, v_cache, lengths):
    """For each sequence its index, its length and the tensors [H, L, d] of which the last row is the query's."""
    batch, heads, _ = q.shape
    dtype = exact(q.dtype)
    for b, length in enumerate(lengths.tolist()):
        if not 1 <= length <= k_cache.shape[1]:
            raise ValueError(f"lengths: expected numbers from 1 to {k_cache.shape[1]}, got {length}")
        k, v = (heads_of(x[b], 0, length, heads, dtype) for x in (k_cache, v_cache))
        yield b, length, (q[b].to(dtype)[:, None].expand(-1, length, -1), k, v)


@stickbreaking_decode.register_kernel("cpu")
def _(q, k_cache, v_cache, lengths, gate_cache, remainder_vector, scale, attend_current, remainder, skip_epsilon):
    o = torch.empty_like(q, memory_format=torch.contiguous_format)
    for b, length, qkv in _cached_documents(q, k_cache, v_cache, lengths):
        gate = gate_cache[b, :length].t().to(qkv[0].dtype) if gate_cache is not None else None
        y, _ = _formulas.stickbreaking_document(*qkv, gate, remainder_vector, scale, attend_current, remainder)
        o[b] = y[:, -1].to(o.dtype)
    return o


@softmax_decode.register_kernel("cpu")
def _(q, k_cache, v_cache, lengths, fire, bias, scale, window):
    o = torch.empty_like(q, memory_format=torch.contiguous_format)
    for b, _, qkv in _cached_documents(q, k_cache, v_cache, lengths):
        o[b] = _formulas.softmax_document(*qkv, bias, fire, scale, window)[0][:, -1].to(o.dtype)
    return o


@stickbreaking_decode.register_fake
def _(q, k_cache, v_cache, lengths, gate_cache, remainder_vector, scale, attend_current, remainder, skip_epsilon):
    return q.new_empty(q.shape)


@softmax_decode.register_fake
def _(q, k_cache, v_cache, lengths, fire, bias, scale, window):
    return q.new_empty(q.shape)
