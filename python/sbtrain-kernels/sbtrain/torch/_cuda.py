"""The ops of _ops.py on a GPU: calls of the C interface, on torch's current stream and with its memory."""
import functools
import math
import warnings

import torch

from .. import kernels

LARGE_WORKSPACE = 64 << 20  # bytes

_warned = set()


def warn_once(text):
    if text not in _warned:
        _warned.add(text)
        warnings.warn(text, stacklevel=3)


def brain(*tensors):
    """The tensors in bf16, the type of the kernels: f16 is converted, and that is said once."""
    for x in tensors:
        if x is not None and x.dtype == torch.float16:
            warn_once(
                "sbtrain's kernels compute in bfloat16: float16 tensors are converted, and lose 3 bits of their fraction. "
                "Give bfloat16 tensors (torch.autocast(\"cuda\", torch.bfloat16)) to avoid it."
            )
    return [x if x is None or x.dtype == torch.bfloat16 else x.to(torch.bfloat16) for x in tensors]


def pointer(x):
    return None if x is None else x.data_ptr()


def row_stride(x):
    """The elements from row to row of x [T, H, d]. The stride of a dimension of size 1 says nothing."""
    return x.stride(0) if x.shape[0] > 1 else x.shape[1] * x.shape[2]


def fits(x):
    """Whether the kernels can read x [T, H, d] where it lies."""
    dense = x.stride(2) == 1 and (x.shape[1] == 1 or x.stride(1) == x.shape[2])
    return dense and row_stride(x) >= x.shape[1] * x.shape[2] and row_stride(x) % 8 == 0 and x.data_ptr() % 16 == 0


def give(rows, x):
    """Lets the rows of a planned struct, whose stride is that of dense tensors, be those of x [T, H, d] or [B, T, H, d].
    What comes back, x or a copy that the kernels can read, has to live until the struct's call."""
    address = x.data_ptr()
    if address % 16 == 0 and x.is_contiguous():  # nearly all tensors; what follows takes longer
        rows.data = address
        return x
    if x.dim() == 4:
        x = x.flatten(0, 1)
    if x.numel() > 0 and not fits(x):
        x = x.clone(memory_format=torch.contiguous_format)
    rows.data, rows.stride = x.data_ptr(), row_stride(x)
    return x


def like(rows, x):
    """Memory for what has the shape of x [..., H, d] bf16, in the rows of a planned struct."""
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    rows.data = y.data_ptr()
    return y


def as_type(dtype, *tensors):
    return tensors if dtype == torch.bfloat16 else [x.to(dtype) for x in tensors]


def dense(x):
    return None if x is None else x.contiguous()


def current_stream(device):
    """The handle of torch's current stream; torch.cuda.current_stream makes an object around it, in ten times the time."""
    return torch._C._cuda_getCurrentRawStream(device)


def sizes(q):
    """The device of q [T, H, d] or [B, T, H, d], and what it has of tokens, heads and channels of a head."""
    *tokens, heads, head_dim = q.shape
    return q.get_device(), math.prod(tokens), heads, head_dim


def documents(tokens, max_seqlen, cu_seqlens):
    """How many documents there are, and the bound of their lengths."""
    if cu_seqlens is not None:
        return cu_seqlens.shape[0] - 1, max_seqlen or max(tokens, 1)
    max_seqlen = max_seqlen or max(tokens, 1)
    return max(tokens // max_seqlen, 1), max_seqlen


# What a struct has of scalars, the strides of dense tensors, and the workspace depend on shapes and options alone: they
# are made once for each set of them, and a call copies the struct and fills in pointers.
PLANNED = {
    "sbtrain_stickbreaking": (
        "heads", "kv_heads", "head_dim", "tokens", "sequences", "max_seqlen", "scale", "attend_current", "remainder",
        "skip_epsilon"
    ),
    "sbtrain_softmax": ("heads", "kv_heads", "head_dim", "tokens", "sequences", "max_seqlen", "scale", "bias", "window"),
    "sbtrain_decode": (
        "heads", "kv_heads", "head_dim", "batch", "capacity", "scale", "attend_current", "remainder", "skip_epsilon",
        "bias", "window"
    ),
}


@functools.lru_cache(maxsize=1024)
def plan(kind, backward, device, has_cu_seqlens, has_gate, *values):
    """A struct without its pointers, and the bytes of workspace that a call takes. `values` are those of PLANNED: a
    cache finds them faster without names."""
    x = kernels.STRUCTS[kind](device=device, **dict(zip(PLANNED[kind], values)))
    if has_cu_seqlens:
        x.cu_seqlens = 16  # whether it is null is all that the workspace depends on
    if has_gate:
        x.gate, x.gate_stride = 16, x.heads
    for names, heads in ((("q", "o", "d_o", "dq"), x.heads), (("k", "v", "dk", "dv"), x.kv_heads)):
        for rows in (getattr(x, name) for name in names if hasattr(x, name)):
            rows.stride = heads * x.head_dim
    return x, kernels.workspace(kind.removeprefix("sbtrain_"), x, backward)


def started(x, device):
    """A struct like x for a call on torch's current stream."""
    x = type(x).from_buffer_copy(x)
    x.stream = current_stream(device)
    return x


def run(name, x, size, device):
    """Calls a function with `size` bytes of workspace from torch's allocator."""
    workspace = torch.empty(size, dtype=torch.uint8, device=device)
    x.workspace, x.workspace_bytes = workspace.data_ptr(), size
    kernels.call(name, x)


def say_cost(x, max_seqlen, size):
    """What it costs that the longest document is not known, after the call x: the workspace is that of a single one."""
    if x.cu_seqlens is None or max_seqlen or size < LARGE_WORKSPACE:
        return
    known = type(x).from_buffer_copy(x)
    known.max_seqlen = max(-(-x.tokens // x.sequences), 1)  # the longest is at least as long
    least = kernels.workspace("stickbreaking", known, True)
    if size - least >= LARGE_WORKSPACE:
        warn_once(
            f"sbtrain: cu_seqlens without max_seqlen: the backward pass takes {size >> 20} MiB of workspace, as if the "
            f"{x.tokens} tokens were one document. With max_seqlen, an upper bound of the documents' lengths, it takes down "
            f"to {least >> 20} MiB."
        )


# ---- Stick-breaking ---------------------------------------------------------------------------------------------


def stick_call(backward, q, k, cu_seqlens, gate, vector, max_seqlen, scale, attend_current, remainder, skip_epsilon):
    """The struct of a call, with the pointers that both passes have but for q, k and v, and its bytes of workspace."""
    device, tokens, heads, head_dim = sizes(q)
    sequences, max_seqlen = documents(tokens, max_seqlen, cu_seqlens)
    template, size = plan(
        "sbtrain_stickbreaking", backward, device, cu_seqlens is not None, gate is not None, heads, k.shape[-2], head_dim,
        tokens, sequences, max_seqlen, scale, int(attend_current), remainder, skip_epsilon
    )
    x = started(template, device)
    x.cu_seqlens, x.gate, x.remainder_vector = pointer(cu_seqlens), pointer(gate), pointer(vector)
    return x, size


def stickbreaking_forward(
    q, k, v, cu_seqlens, gate, vector, max_seqlen, scale, attend_current, remainder, skip_epsilon
):
    dtype, shape, device = q.dtype, q.shape, q.device
    if dtype != torch.bfloat16:
        q, k, v, vector = brain(q, k, v, vector)
    cu_seqlens, gate, vector = dense(cu_seqlens), dense(gate), dense(vector)
    x, size = stick_call(
        False, q, k, cu_seqlens, gate, vector, max_seqlen, scale, attend_current, remainder, skip_epsilon
    )
    o = like(x.o, q)
    q, k, v = give(x.q, q), give(x.k, k), give(x.v, v)
    log2_rem = torch.empty(x.heads, x.tokens, dtype=torch.float32, device=device)
    stop = torch.empty(x.heads, x.tokens, dtype=torch.int32, device=device)
    x.log2_remainder, x.stop = log2_rem.data_ptr(), stop.data_ptr()
    run("sbtrain_stickbreaking_forward", x, size, device)
    rem = torch.empty(*shape[:-1], dtype=torch.float32, device=device)
    torch.exp2(log2_rem.t(), out=rem if rem.dim() == 2 else rem.view(x.tokens, x.heads))
    return *as_type(dtype, o), rem, log2_rem, stop


def stickbreaking_backward(
    d_o, d_rem, q, k, v, cu_seqlens, gate, vector, log2_rem, stop, max_seqlen, scale, attend_current, remainder,
    skip_epsilon
):
    dtype, device = q.dtype, q.device
    if dtype != torch.bfloat16:
        d_o, q, k, v, vector = brain(d_o, q, k, v, vector)
    cu_seqlens, gate, vector = dense(cu_seqlens), dense(gate), dense(vector)
    x, size = stick_call(
        True, q, k, cu_seqlens, gate, vector, max_seqlen, scale, attend_current, remainder, skip_epsilon
    )
    dq, dk, dv = like(x.dq, q), like(x.dk, k), like(x.dv, v)
    d_o, q, k, v = give(x.d_o, d_o), give(x.q, q), give(x.k, k), give(x.v, v)
    x.log2_remainder, x.stop = log2_rem.data_ptr(), stop.data_ptr()
    if d_rem is not None:
        d_rem = d_rem.float().reshape(x.tokens, x.heads).t().contiguous()
        x.d_remainder = d_rem.data_ptr()
    others = []
    if gate is not None:
        others.append(torch.empty(gate.shape, dtype=torch.bfloat16, device=device))
        x.d_gate, x.d_gate_stride = others[0].data_ptr(), x.heads
    if vector is not None:
        others.append(torch.empty(vector.shape, dtype=torch.float32, device=device))
        x.d_remainder_vector = others[-1].data_ptr()
    run("sbtrain_stickbreaking_backward", x, size, device)
    say_cost(x, max_seqlen, size)
    return [*as_type(dtype, dq, dk, dv), *(d.float() for d in others)]


# ---- Softmax ----------------------------------------------------------------------------------------------------


def fire_pointers(parameters):
    return kernels.Fire(*(x.data_ptr() for x in parameters))


def softmax_call(backward, q, k, cu_seqlens, bias, max_seqlen, scale, window):
    device, tokens, heads, head_dim = sizes(q)
    sequences, max_seqlen = documents(tokens, max_seqlen, cu_seqlens)
    template, size = plan(
        "sbtrain_softmax", backward, device, cu_seqlens is not None, False, heads, k.shape[-2], head_dim, tokens, sequences,
        max_seqlen, scale, bias, window
    )
    x = started(template, device)
    x.cu_seqlens = pointer(cu_seqlens)
    return x, size


def softmax_forward(q, k, v, cu_seqlens, fire, bias, max_seqlen, scale, window):
    dtype, device = q.dtype, q.device
    if dtype != torch.bfloat16:
        q, k, v = brain(q, k, v)
    cu_seqlens, fire = dense(cu_seqlens), [dense(x) for x in brain(*fire)]
    x, size = softmax_call(False, q, k, cu_seqlens, bias, max_seqlen, scale, window)
    o = like(x.o, q)
    q, k, v = give(x.q, q), give(x.k, k), give(x.v, v)
    lse = torch.empty(x.heads, x.tokens, dtype=torch.float32, device=device)
    x.lse = lse.data_ptr()
    if fire:
        x.fire = fire_pointers(fire)
    run("sbtrain_softmax_forward", x, size, device)
    return *as_type(dtype, o), lse


def softmax_backward(d_o, q, k, v, o, lse, cu_seqlens, fire, bias, max_seqlen, scale, window):
    dtype, device = q.dtype, q.device
    if dtype != torch.bfloat16:
        d_o, q, k, v, o = brain(d_o, q, k, v, o)
    cu_seqlens, fire = dense(cu_seqlens), [dense(x) for x in brain(*fire)]
    x, size = softmax_call(True, q, k, cu_seqlens, bias, max_seqlen, scale, window)
    dq, dk, dv = like(x.dq, q), like(x.dk, k), like(x.dv, v)
    d_o, q, k, v = give(x.d_o, d_o), give(x.q, q), give(x.k, k), give(x.v, v)
    o = give(x.o, o)
    gradients = [torch.empty(p.shape, dtype=torch.float32, device=device) for p in fire[:5]]
    x.lse = lse.data_ptr()
    if fire:
        x.fire, x.d_fire = fire_pointers(fire), kernels.FireGradients(*(p.data_ptr() for p in gradients))
    run("sbtrain_softmax_backward", x, size, device)
    return [*as_type(dtype, dq, dk, dv), *gradients]


# ---- Decoding ---------------------------------------------------------------------------------------------------


def decode(
    name, q, k_cache, v_cache, lengths, vector=None, gate_cache=None, fire=(), *, scale, attend_current=0, remainder=0,
    skip_epsilon=0.0, bias=0, window=0
):
    """q [B, H, d], caches [B, C, G, d]."""
    if not (k_cache.is_contiguous() and v_cache.is_contiguous()):
        raise ValueError("decode: k_cache and v_cache have to be contiguous; they are not copied")
    dtype, device = q.dtype, q.get_device()
    batch, heads, head_dim = q.shape
    q, vector, *fire = brain(q, vector, *fire)
    lengths, gate_cache, vector, fire = dense(lengths), dense(gate_cache), dense(vector), [dense(p) for p in fire]
    template, size = plan(
        "sbtrain_decode", None, device, False, False, heads, k_cache.shape[2], head_dim, batch, k_cache.shape[1], scale,
        attend_current, remainder, skip_epsilon, bias, window
    )
    x = started(template, device)
    o = like(x.o, q)
    q = give(x.q, q)
    x.k_cache, x.v_cache, x.lengths = k_cache.data_ptr(), v_cache.data_ptr(), lengths.data_ptr()
    x.gate_cache, x.remainder_vector = pointer(gate_cache), pointer(vector)
    if fire:
        x.fire = fire_pointers(fire)
    run(name, x, size, q.device)
    return o.to(dtype)


def stickbreaking_decode(
    q, k_cache, v_cache, lengths, gate_cache, vector, scale, attend_current, remainder, skip_epsilon
):
    return decode(
        "sbtrain_stickbreaking_decode", q, k_cache, v_cache, lengths, vector, gate_cache, scale=scale,
        attend_current=int(attend_current), remainder=remainder, skip_epsilon=skip_epsilon
    )


def softmax_decode(q, k_cache, v_cache, lengths, fire, bias, scale, window):
    return decode(
        "sbtrain_softmax_decode", q, k_cache, v_cache, lengths, fire=fire, scale=scale, bias=bias, window=window
    )
