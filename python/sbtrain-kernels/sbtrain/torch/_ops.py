"""The ops sbtrain::... of torch.library over packs: their types, their shapes for tracing, and their gradients. What
computes is in _cuda.py and _cpu.py; _attention.py has what users call.

Shapes: q and o [T, H, d], k and v [T, G, d], gate [T, H] f32, rem [T, H] f32; cu_seqlens [N + 1] i32 or None, and then
all documents have max_seqlen tokens. All tensors of tokens may be [B, T, ...] instead, which stands for B T tokens.
max_seqlen 0: not known. log2_rem [H, T] and stop [H, T] are what the backward pass reads. That gives the gradients of q, k
and v, and behind them those of the gate and of the remainder's vector where there are such.

torch.library.custom_op would do the same in fewer lines and takes about 30 us of the host more for each pass: what it
wraps around a kernel and around autograd looks at every argument several times. For the same reason there are two ways to
call an op. `stickbreaking_forward` is the op itself, which every call through torch's dispatcher reaches.
`call_stickbreaking_forward` begins where the dispatcher would arrive first, at the op's implementation for autograd, and
so goes through the dispatcher once rather than twice.
"""
import torch

from . import _cpu, _cuda
from ._formulas import exact

LIBRARY = torch.library.Library("sbtrain", "FRAGMENT")
# Compiled graphs hand over tensors that lie as they were traced, so that none is copied for another reason.
TAGS = (
    torch.Tag.pt2_compliant_tag,
    torch.Tag.needs_exact_strides if hasattr(torch.Tag, "needs_exact_strides") else torch.Tag.needs_fixed_stride_order,
)


def define(name, arguments, returns, fake):
    """Defines sbtrain::name by the functions of this name in _cuda.py and _cpu.py, and returns it."""
    LIBRARY.define(f"{name}({arguments}) -> {returns}", tags=TAGS)
    LIBRARY.impl(name, getattr(_cuda, name), "CUDA")
    LIBRARY.impl(name, getattr(_cpu, name), "CPU")
    torch.library.register_fake(f"sbtrain::{name}", fake, lib=LIBRARY)
    return getattr(torch.ops.sbtrain, name).default


def comes_before_autograd(inputs):
    """Whether there is something that has to see an op before autograd does: torch.compile and torch.export, functions
    that are transformed (torch.func), modes and tensors with a __torch_function__."""
    return (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or torch.overrides.has_torch_function(inputs)
    )


def differentiate(name, op, function, inputs_of=lambda inputs: inputs):
    """Makes `function`, an autograd.Function, what autograd does with an op. inputs_of gives its inputs from the op's,
    with lists of tensors taken apart: autograd looks into none. What are no tensors may stand in one tuple.

    Returns a function that calls the op with fewer steps in eager code."""
    returns_list = op._schema.returns[0].type.kind() == "ListType"

    def autograd(*inputs):
        if torch.is_grad_enabled():
            flat = inputs_of(inputs)
            for x in flat:
                if isinstance(x, torch.Tensor) and x.requires_grad:
                    output = function.apply(*flat)
                    return list(output) if returns_list else output
        with torch._C._AutoDispatchBelowAutograd():
            return op(*inputs)

    def call(*inputs):
        return op(*inputs) if comes_before_autograd(inputs) else autograd(*inputs)

    LIBRARY.impl(name, autograd, "Autograd")
    return call


def refuse_gradients(name, op, why):
    """Makes a backward pass through an op an error that says why. Returns what differentiate() does."""

    class Undifferentiable(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *inputs):
            with torch._C._AutoDispatchBelowAutograd():
                output = op(*inputs)
            return tuple(output) if isinstance(output, list) else output

        @staticmethod
        def backward(ctx, *_):
            raise RuntimeError(f"sbtrain::{name} has no gradients: {why}")

    return differentiate(name, op, Undifferentiable)


# ---- Stick-breaking ---------------------------------------------------------------------------------------------


def _stickbreaking_fake(
    q, k, v, cu_seqlens, gate, remainder_vector, max_seqlen, scale, attend_current, remainder, skip_epsilon
):
    heads, dtype = q.shape[-2], exact(q.dtype)
    left = q.new_empty(heads, q.shape[:-2].numel(), dtype=dtype)
    rem = q.new_empty(q.shape[:-1], dtype=dtype)
    return q.new_empty(q.shape), rem, left, left.new_empty(left.shape, dtype=torch.int32)


def _stickbreaking_backward_fake(
    d_o, d_rem, q, k, v, cu_seqlens, gate, remainder_vector, log2_rem, stop, max_seqlen, scale, attend_current,
    remainder, skip_epsilon
):
    others = [x.new_empty(x.shape, dtype=exact(q.dtype)) for x in (gate, remainder_vector) if x is not None]
    return [q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), *others]


stickbreaking_forward = define(
    "stickbreaking_forward",
    "Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens, Tensor? gate, Tensor? remainder_vector, SymInt max_seqlen, "
    "float scale, bool attend_current, int remainder, float skip_epsilon",
    "(Tensor, Tensor, Tensor, Tensor)",
    _stickbreaking_fake,
)
stickbreaking_backward = define(
    "stickbreaking_backward",
    "Tensor d_o, Tensor? d_rem, Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens, Tensor? gate, "
    "Tensor? remainder_vector, Tensor log2_rem, Tensor stop, SymInt max_seqlen, float scale, bool attend_current, "
    "int remainder, float skip_epsilon",
    "Tensor[]",
    _stickbreaking_backward_fake,
)


class StickBreaking(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *inputs):
        *tensors, options = inputs
        with torch._C._AutoDispatchBelowAutograd():
            output = stickbreaking_forward(*tensors, *options)
        ctx.set_materialize_grads(False)  # a remainder that nobody uses costs nothing
        ctx.mark_non_differentiable(*output[2:])
        ctx.save_for_backward(*tensors, *output[2:])
        ctx.options = options
        return output

    @staticmethod
    def backward(ctx, d_o, d_rem, *_):
        q, _, _, _, gate, vector, *_ = saved = ctx.saved_tensors
        if d_o is None and d_rem is None:
            return (None,) * 7
        if d_o is None:
            d_o = torch.zeros_like(q)
        dq, dk, dv, *others = call_stickbreaking_backward(d_o, d_rem, *saved, *ctx.options)
        d_gate = others.pop(0).to(gate.dtype) if gate is not None else None
        d_vector = others.pop().to(vector.dtype) if vector is not None else None
        return dq, dk, dv, None, d_gate, d_vector, None


call_stickbreaking_forward = differentiate(
    "stickbreaking_forward", stickbreaking_forward, StickBreaking, lambda x: (*x[:6], x[6:])
)
call_stickbreaking_backward = refuse_gradients(
    "stickbreaking_backward", stickbreaking_backward, "gradients of gradients are not there"
)


# ---- Softmax ----------------------------------------------------------------------------------------------------


def _softmax_fake(q, k, v, cu_seqlens, fire, bias, max_seqlen, scale, window):
    return q.new_empty(q.shape), q.new_empty(q.shape[-2], q.shape[:-2].numel(), dtype=exact(q.dtype))


def _softmax_backward_fake(d_o, q, k, v, o, lse, cu_seqlens, fire, bias, max_seqlen, scale, window):
    parameters = [x.new_empty(x.shape, dtype=exact(q.dtype)) for x in fire[:5]]
    return [q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), *parameters]


softmax_forward = define(
    "softmax_forward",
    "Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens, Tensor[] fire, int bias, SymInt max_seqlen, float scale, "
    "SymInt window",
    "(Tensor, Tensor)",
    _softmax_fake,
)
softmax_backward = define(
    "softmax_backward",
    "Tensor d_o, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, Tensor? cu_seqlens, Tensor[] fire, int bias, "
    "SymInt max_seqlen, float scale, SymInt window",
    "Tensor[]",
    _softmax_backward_fake,
)


class Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, cu_seqlens, bias, max_seqlen, scale, window, *fire):
        with torch._C._AutoDispatchBelowAutograd():
            o, lse = softmax_forward(q, k, v, cu_seqlens, fire, bias, max_seqlen, scale, window)
        ctx.mark_non_differentiable(lse)
        ctx.save_for_backward(q, k, v, o, lse, cu_seqlens, *fire)
        ctx.options = bias, max_seqlen, scale, window
        return o, lse

    @staticmethod
    def backward(ctx, d_o, _):
        q, k, v, o, lse, cu_seqlens, *fire = ctx.saved_tensors
        dq, dk, dv, *d_fire = call_softmax_backward(d_o, q, k, v, o, lse, cu_seqlens, fire, *ctx.options)
        d_fire = [d.to(x.dtype) for d, x in zip(d_fire, fire)]
        if fire:
            d_fire.append(torch.zeros_like(fire[5]))  # b2 shifts all logits of a query alike
        return dq, dk, dv, None, None, None, None, None, *d_fire


call_softmax_forward = differentiate(
    "softmax_forward", softmax_forward, Softmax, lambda x: (*x[:4], *x[5:], *x[4])
)
call_softmax_backward = refuse_gradients("softmax_backward", softmax_backward, "gradients of gradients are not there")


# ---- Decoding: without gradients --------------------------------------------------------------------------------


def _decode_fake(q, *_):
    return q.new_empty(q.shape)


stickbreaking_decode = define(
    "stickbreaking_decode",
    "Tensor q, Tensor k_cache, Tensor v_cache, Tensor lengths, Tensor? gate_cache, Tensor? remainder_vector, "
    "float scale, bool attend_current, int remainder, float skip_epsilon",
    "Tensor",
    _decode_fake,
)
softmax_decode = define(
    "softmax_decode",
    "Tensor q, Tensor k_cache, Tensor v_cache, Tensor lengths, Tensor[] fire, int bias, float scale, SymInt window",
    "Tensor",
    _decode_fake,
)
call_stickbreaking_decode, call_softmax_decode = (
    refuse_gradients(name, op, "it is for generation; train with attention over documents")
    for name, op in (("stickbreaking_decode", stickbreaking_decode), ("softmax_decode", softmax_decode))
)
