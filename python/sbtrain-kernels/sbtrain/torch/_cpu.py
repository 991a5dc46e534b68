"""The ops of _ops.py on a CPU, document by document, by the formulas of _formulas.py."""
import torch

from . import _formulas
from ._formulas import documents, exact, heads_of, sum_groups


def flat(q, *tensors):
    """q [T, H, d] of q [B, T, H, d], and other tensors likewise; None stays."""
    if q.dim() == 3:
        return q, *tensors
    return [None if x is None else x.flatten(0, 1) for x in (q, *tensors)]


# ---- Stick-breaking ---------------------------------------------------------------------------------------------


def stickbreaking_forward(
    q, k, v, cu_seqlens, gate, remainder_vector, max_seqlen, scale, attend_current, remainder, skip_epsilon
):
    shape = q.shape
    q, k, v, gate = flat(q, k, v, gate)
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
    rem = log_rem.exp().t().contiguous()
    return o.to(q.dtype).reshape(shape), rem.reshape(shape[:-1]), log2_rem, stop


def stickbreaking_backward(
    d_o, d_rem, q, k, v, cu_seqlens, gate, remainder_vector, log2_rem, stop, max_seqlen, scale, attend_current,
    remainder, skip_epsilon
):
    shapes = [x.shape for x in (q, k, v)]
    others = [torch.zeros(x.shape, dtype=exact(q.dtype)) for x in (gate, remainder_vector) if x is not None]
    q, k, v, d_o, d_rem, gate, d_gate = flat(q, k, v, d_o, d_rem, gate, others[0] if gate is not None else None)
    tokens, heads, _ = q.shape
    groups, dtype = k.shape[1], exact(q.dtype)
    dq, dk, dv = (torch.zeros(x.shape, dtype=dtype) for x in (q, k, v))
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
            others[-1] += of_vector
    gradients = [d.to(q.dtype).reshape(shape) for d, shape in zip((dq, dk, dv), shapes)]
    return [*gradients, *others]


# ---- Softmax ----------------------------------------------------------------------------------------------------


def softmax_forward(q, k, v, cu_seqlens, fire, bias, max_seqlen, scale, window):
    shape = q.shape
    q, k, v = flat(q, k, v)
    tokens, heads, _ = q.shape
    dtype = exact(q.dtype)
    o, lse = torch.zeros(q.shape, dtype=dtype), torch.zeros(heads, tokens, dtype=dtype)
    for begin, end in documents(tokens, max_seqlen or tokens, cu_seqlens):
        qkv = [heads_of(x, begin, end, heads, dtype) for x in (q, k, v)]
        y, lse[:, begin:end] = _formulas.softmax_document(*qkv, bias, fire, scale, window)
        o[begin:end] = y.transpose(0, 1)
    return o.to(q.dtype).reshape(shape), lse


def softmax_backward(d_o, q, k, v, o, lse, cu_seqlens, fire, bias, max_seqlen, scale, window):
    shapes = [x.shape for x in (q, k, v)]
    q, k, v, d_o = flat(q, k, v, d_o)
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
    return [*(d.to(q.dtype).reshape(shape) for d, shape in zip((dq, dk, dv), shapes)), *d_fire]


# ---- Decoding ---------------------------------------------------------------------------------------------------


def cached_documents(q, k_cache, v_cache, lengths):
    """For each sequence its index, its length and the tensors [H, L, d] of which the last row is the query's."""
    batch, heads, _ = q.shape
    dtype = exact(q.dtype)
    for b, length in enumerate(lengths.tolist()):
        if not 1 <= length <= k_cache.shape[1]:
            raise ValueError(f"lengths: expected numbers from 1 to {k_cache.shape[1]}, got {length}")
        k, v = (heads_of(x[b], 0, length, heads, dtype) for x in (k_cache, v_cache))
        yield b, length, (q[b].to(dtype)[:, None].expand(-1, length, -1), k, v)


def stickbreaking_decode(
    q, k_cache, v_cache, lengths, gate_cache, remainder_vector, scale, attend_current, remainder, skip_epsilon
):
    o = torch.empty_like(q, memory_format=torch.contiguous_format)
    for b, length, qkv in cached_documents(q, k_cache, v_cache, lengths):
        gate = gate_cache[b, :length].t().to(qkv[0].dtype) if gate_cache is not None else None
        y, _ = _formulas.stickbreaking_document(*qkv, gate, remainder_vector, scale, attend_current, remainder)
        o[b] = y[:, -1].to(o.dtype)
    return o


def softmax_decode(q, k_cache, v_cache, lengths, fire, bias, scale, window):
    o = torch.empty_like(q, memory_format=torch.contiguous_format)
    for b, _, qkv in cached_documents(q, k_cache, v_cache, lengths):
        o[b] = _formulas.softmax_document(*qkv, bias, fire, scale, window)[0][:, -1].to(o.dtype)
    return o
