"""What users call: checks with names, layouts, padding and queries that are fewer than keys, over the ops of _ops.py.

Nothing here reads a tensor on the host.
"""
from typing import NamedTuple, Optional

import torch
import torch.nn.functional as F

from . import _ops

SKIP_EPSILON = 2.0**-24
MAX_HEAD_DIM = 256
REMAINDERS = {None: 0, "none": 0, "value": 1}
BIASES = {None: 0, "none": 0, "alibi": 1}


class Fire(NamedTuple):
    """The parameters of FIRE (arXiv 2310.04418), whose MLP is 1 -> 32 -> H: c and m [1], w1 and b1 [32], w2 [H, 32],
    b2 [H]."""

    c: torch.Tensor
    m: torch.Tensor
    w1: torch.Tensor
    b1: torch.Tensor
    w2: torch.Tensor
    b2: torch.Tensor


def refuse(text, *values):
    """Raises a ValueError with the values in the text's {}."""
    raise ValueError(text.format(*(list(x) if isinstance(x, torch.Size) else x for x in values)))


def require(good, text, *values):
    """Refuses what is not good. What every call goes through asks with `if` instead, which does not put the values
    together where all is good."""
    if not good:
        refuse(text, *values)


def autocast(*tensors):
    """The tensors in the type of torch.autocast, where it is on: newer versions of torch can register that for an
    op, older ones cannot."""
    x = tensors[0]
    device = "cuda" if x.is_cuda else "cpu"
    if not (x.is_cuda or x.is_cpu) or not torch.is_autocast_enabled(device):  # check_types refuses other devices
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return [x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors]


def check_types(q, k, v):
    dtype, device = q.dtype, q.device
    if not dtype == k.dtype == v.dtype:
        refuse("q, k and v: expected one type, got {}, {} and {}", dtype, k.dtype, v.dtype)
    if not device == k.device == v.device:
        refuse("q, k and v: expected one device, got {}, {} and {}", device, k.device, v.device)
    if q.is_cpu:
        require(q.is_floating_point(), "q: expected floating-point numbers, got {}", dtype)
        return
    if not q.is_cuda:
        refuse("q: sbtrain computes on CPUs and CUDA GPUs, not on {}", device)
    if dtype != torch.bfloat16 and dtype != torch.float16:
        refuse(
            "q is {}, but the kernels multiply on tensor cores in bfloat16: convert with .to(torch.bfloat16), or use "
            'torch.autocast("cuda", torch.bfloat16)',
            dtype,
        )
    channels = q.shape[-1]
    if channels % 8 != 0:
        refuse("q: heads have {} channels, not a multiple of 8; pad q, k and v with zeros", channels)
    if channels > MAX_HEAD_DIM:
        refuse("q: heads have {} channels, at most {} are possible", channels, MAX_HEAD_DIM)


def check_shapes(q, k, v, heads_dim):
    shape, keys, values = q.shape, k.shape, v.shape
    for name, x in (("q", shape), ("k", keys), ("v", values)):
        if len(x) != 3 and len(x) != 4:
            refuse("{}: expected [T, H, d] or [B, T, H, d], got {}", name, x)
    if len(shape) != len(keys) or keys != values or shape[-1] != keys[-1]:
        refuse(
            "q, k and v: expected the same dimensions, and k and v of one shape, got {}, {} and {}", shape, keys, values
        )
    heads, groups = shape[heads_dim], keys[heads_dim]
    if groups <= 0 or heads % groups != 0:
        refuse("q has {} heads and k {}: those of k have to divide those of q", heads, groups)


class Pack:
    """The tokens of a batch one behind the other, as the ops take them: how tensors come in and go out. Where all stand
    in their order already, they come and go as they are.

    q [B, Tq, H, d], k and v [B, Tk, G, d] with Tq <= Tk, or [T, H, d]. documents [B, Tk] has the number of each token's
    document, negative for padding; a mask says the same of rows of one document.
    """

    def __init__(self, q, k, cu_seqlens, max_seqlen, mask, documents, query_start):
        self.packed = q.dim() == 3
        self.batch = 1 if self.packed else q.shape[0]
        self.queries, self.keys = q.shape[-3], k.shape[-3]
        self.order = self.valid = self.query_index = None
        self.cu_seqlens, self.max_seqlen = cu_seqlens, max_seqlen or 0
        if cu_seqlens is not None:
            require(mask is None and documents is None, "cu_seqlens, attention_mask and documents: give one of them")
            self.take_bounds(cu_seqlens, query_start)
        else:
            require(self.packed or k.shape[0] == self.batch, "q has {} rows and k {}", self.batch, k.shape[0])
            self.max_seqlen = self.keys
        self.place_queries(query_start, q.device)
        if mask is not None:
            require(documents is None, "cu_seqlens, attention_mask and documents: give one of them")
            self.sort(self.of_tokens("attention_mask", mask).bool().long() - 1)
        elif documents is not None:
            self.sort(self.of_tokens("documents", documents).long())
        self.whole = self.order is None and self.query_index is None and self.queries == self.keys

    def take_bounds(self, cu_seqlens, query_start):
        require(query_start is None, "query_start: not with cu_seqlens")
        require(self.batch == 1, "cu_seqlens: expected q of [T, H, d] or [1, T, H, d], got a batch of {}", self.batch)
        queries, keys = self.queries, self.keys
        require(queries == keys, "cu_seqlens: expected as many queries as keys, got {} and {}", queries, keys)
        require(
            cu_seqlens.dim() == 1 and cu_seqlens.shape[0] >= 2 and cu_seqlens.dtype in (torch.int32, torch.int64),
            "cu_seqlens: expected integers [documents + 1], got {} {}",
            cu_seqlens.dtype,
            cu_seqlens.shape,
        )
        self.cu_seqlens = cu_seqlens.to(torch.int32)

    def place_queries(self, start, device):
        """Queries that are fewer than keys stand at the end, or from `start` on, among queries that are not used."""
        require(self.queries <= self.keys, "q has {} tokens and k {}: queries without keys", self.queries, self.keys)
        if start is None:
            return
        offset = start if isinstance(start, torch.Tensor) else torch.full((), start, device=device)
        self.query_index = offset.to(device).reshape(()) + torch.arange(self.queries, device=device)

    def of_tokens(self, name, x):
        require(not self.packed, "{}: not with q of [T, H, d]; give cu_seqlens", name)
        expected = (self.batch, self.keys)
        require(tuple(x.shape) == expected, "{}: expected {} (rows, keys), got {}", name, list(expected), x.shape)
        return x

    def sort(self, document):
        """Puts the tokens of one document behind each other, in their order, then those of the next one."""
        self.valid = document >= 0
        tokens = self.batch * self.keys
        row = torch.arange(self.batch, device=document.device)[:, None]
        key = (row * (self.keys + 1) + document.clamp(min=-1) + 1).flatten()
        key, self.order = torch.sort(key, stable=True)
        at = torch.arange(tokens, device=document.device)
        first = F.pad(key[1:] != key[:-1], (1, 0), value=True)
        begins = torch.sort(torch.where(first, at, tokens)).values
        self.cu_seqlens = F.pad(begins, (0, 1), value=tokens).to(torch.int32)
        self.max_seqlen = self.keys

    def tokens_in(self, x):
        """What is there for each key as the ops take it: [T, ...], or [B, T, ...] where all is whole."""
        if self.whole:
            return x
        if not self.packed:
            x = x.flatten(0, 1)
        return x if self.order is None else x.index_select(0, self.order)

    def queries_in(self, q):
        if self.whole:
            return q
        if self.query_index is not None:
            whole = q.new_zeros(*q.shape[:-3], self.keys, *q.shape[-2:])
            q = whole.index_copy(q.dim() - 3, self.query_index, q)
        elif self.queries < self.keys:
            q = F.pad(q, (0, 0, 0, 0, self.keys - self.queries, 0))
        return self.tokens_in(q)

    def out(self, x, padding):
        """What the ops give for all queries -> the caller's; `padding` where a query is none."""
        if self.whole:
            return x
        if self.order is not None:
            x = torch.empty_like(x).index_copy(0, self.order, x)
        if self.packed:
            return self.some_queries(x, 0)
        x = x.unflatten(0, (self.batch, self.keys))
        if self.valid is not None:
            x = x.masked_fill(~self.valid.reshape(self.batch, self.keys, *[1] * (x.dim() - 2)), padding)
        return self.some_queries(x, 1)

    def some_queries(self, x, dim):
        if self.query_index is not None:
            return x.index_select(dim, self.query_index)
        return x.narrow(dim, self.keys - self.queries, self.queries) if self.queries < self.keys else x


def stickbreaking_attention(
    q,
    k,
    v,
    *,
    cu_seqlens: Optional[torch.Tensor] = None,
    max_seqlen: Optional[int] = None,
    scale: Optional[float] = None,
    attend_current: bool = False,
    gate: Optional[torch.Tensor] = None,
    remainder=None,
    skip_epsilon: float = SKIP_EPSILON,
    attention_mask: Optional[torch.Tensor] = None,
    documents: Optional[torch.Tensor] = None,
    query_start=None,
    heads_first: bool = False,
):
    """Stick-breaking attention (arXiv 2410.17980): (o, rem), both with gradients.

    Query j gives the keys i < j of its document, the nearest first, sigmoid(scale q_j.k_i) of what is left of a stick
    of length 1; rem_j is what remains.

    q: [B, Tq, H, d], packed [T, H, d] or, with heads_first, [B, H, Tq, d]. k, v: [B, Tk, G, d] likewise; G divides H.
        Fewer queries than keys stand at the end. bfloat16 on a GPU; float16 is converted, float32 is refused there.
    cu_seqlens: [N + 1], the bounds of documents of a pack, from 0 to T. It is not read on the host.
    max_seqlen: an upper bound of the documents' lengths. Without it memory is taken as for one document of T tokens.
    scale: of the logits; 1 / sqrt(d) unless given.
    attend_current: a query sees its own key too.
    gate: f in (0, 1] of each key and head, [B, Tk, H] or [T, H]: a key takes f times its share. With a gradient.
    remainder: "value" adds rem_j v_j to o_j, a tensor r [H, d] adds rem_j r_h.
    skip_epsilon: keys are skipped where every query of a tile has less than this left; 0 skips none.
    attention_mask: [B, Tk], 1 or True for tokens, 0 for padding, wherever it stands. o is 0 and rem 1 where a query is
        padding.
    documents: [B, Tk], the number of each token's document, below 0 for padding: rows of several documents.
    query_start: the place of the first query among the keys, a number or a tensor on the device: for caches that are
        longer than what is in them.

    Returns o of q's shape and type, and rem, float32 (float64 for such q), [B, Tq, H], [T, H] or [B, H, Tq].
    """
    check_shapes(q, k, v, 1 if heads_first and q.dim() == 4 else -2)
    q, k, v = autocast(q, k, v)
    check_types(q, k, v)
    if heads_first:
        require(q.dim() == 4, "heads_first: expected q of [B, H, T, d], got {}", q.shape)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    heads, d = q.shape[-2:]
    kind, vector = remainder_of(remainder, q, heads, d)
    if gate is not None:
        if heads_first:
            gate = gate.transpose(1, 2)
        expected = (*k.shape[:-2], heads)
        require(tuple(gate.shape) == expected, "gate: expected {} (keys, heads), got {}", list(expected), gate.shape)
    pack = Pack(q, k, cu_seqlens, max_seqlen, attention_mask, documents, query_start)
    if gate is not None:
        gate = pack.tokens_in(gate.to(torch.float64 if q.dtype == torch.float64 else torch.float32)).contiguous()
    o, rem, _, _ = _ops.call_stickbreaking_forward(
        pack.queries_in(q), pack.tokens_in(k), pack.tokens_in(v), pack.cu_seqlens, gate, vector, pack.max_seqlen,
        d**-0.5 if scale is None else float(scale), attend_current, kind, float(skip_epsilon)
    )
    o, rem = pack.out(o, 0.0), pack.out(rem, 1.0)
    return (o.transpose(1, 2), rem.transpose(1, 2)) if heads_first else (o, rem)


def remainder_of(remainder, q, heads, d):
    """(kind, vector or None)"""
    if isinstance(remainder, torch.Tensor):
        require(
            tuple(remainder.shape) == (heads, d),
            "remainder: expected [{}, {}] (heads, channels), got {}",
            heads,
            d,
            remainder.shape,
        )
        return 2, remainder.to(q.dtype).contiguous()
    require(remainder in REMAINDERS, 'remainder: expected None, "value" or a tensor [H, d], got {!r}', remainder)
    return REMAINDERS[remainder], None


def bias_of(bias, q, heads):
    """(kind, FIRE's parameters)"""
    if isinstance(bias, (Fire, tuple, list)):
        fire = Fire(*bias)
        shapes = [(1,), (1,), (32,), (32,), (heads, 32), (heads,)]
        for name, x, shape in zip(Fire._fields, fire, shapes):
            require(x.numel() == torch.Size(shape).numel(), "bias.{}: expected {}, got {}", name, list(shape), x.shape)
        return 2, [x.to(q.dtype).reshape(shape) for x, shape in zip(fire, shapes)]
    require(bias in BIASES, 'bias: expected None, "alibi" or Fire(...), got {!r}', bias)
    return BIASES[bias], []


def softmax_attention(
    q,
    k,
    v,
    *,
    cu_seqlens: Optional[torch.Tensor] = None,
    max_seqlen: Optional[int] = None,
    scale: Optional[float] = None,
    bias=None,
    window: Optional[int] = None,
    attention_mask: Optional[torch.Tensor] = None,
    documents: Optional[torch.Tensor] = None,
    query_start=None,
    heads_first: bool = False,
):
    """Causal softmax attention whose gradients are the same bits on every run: o, of q's shape and type.

    bias: None, "alibi" (arXiv 2108.12409) or Fire(...), whose parameters get gradients (b2 has none, since it shifts
        all logits of a query alike). Positions are counted from 0 in each document.
    window: a query sees so many keys, its own included.
    All else is as in stickbreaking_attention.
    """
    check_shapes(q, k, v, 1 if heads_first and q.dim() == 4 else -2)
    q, k, v = autocast(q, k, v)
    check_types(q, k, v)
    require(window is None or window > 0, "window: expected None or a number above 0, got {}", window)
    if heads_first:
        require(q.dim() == 4, "heads_first: expected q of [B, H, T, d], got {}", q.shape)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    heads, d = q.shape[-2:]
    kind, fire = bias_of(bias, q, heads)
    pack = Pack(q, k, cu_seqlens, max_seqlen, attention_mask, documents, query_start)
    o, _ = _ops.call_softmax_forward(
        pack.queries_in(q), pack.tokens_in(k), pack.tokens_in(v), pack.cu_seqlens, fire, kind, pack.max_seqlen,
        d**-0.5 if scale is None else float(scale), window or 0
    )
    o = pack.out(o, 0.0)
    return o.transpose(1, 2) if heads_first else o


# ---- Decoding ---------------------------------------------------------------------------------------------------


def caches_in(q, k_cache, v_cache, lengths, heads_first):
    """q [B, H, d] and the caches as the ops take them, [B, C, G, d]. Caches whose heads come first are read where they
    lie too: each head of keys is a sequence of its own."""
    check_types(q, k_cache, v_cache)
    require(
        q.dim() == 3 and k_cache.dim() == 4 and k_cache.shape == v_cache.shape and k_cache.shape[0] == q.shape[0],
        "expected q of [B, H, d] and caches of [B, C, G, d], got {}, {} and {}",
        q.shape,
        k_cache.shape,
        v_cache.shape,
    )
    require(
        lengths.dtype == torch.int32 and tuple(lengths.shape) == (q.shape[0],),
        "lengths: expected int32 [{}], got {} {}",
        q.shape[0],
        lengths.dtype,
        lengths.shape,
    )
    if not heads_first:
        require(q.shape[1] % k_cache.shape[2] == 0, "q has {} heads and the caches {}", q.shape[1], k_cache.shape[2])
        return q, k_cache, v_cache, lengths
    groups = k_cache.shape[1]
    require(q.shape[1] % groups == 0, "q has {} heads and the caches {}", q.shape[1], groups)
    q = q.unflatten(1, (groups, -1)).flatten(0, 1)
    k_cache, v_cache = (x.flatten(0, 1)[:, :, None] for x in (k_cache, v_cache))
    return q, k_cache, v_cache, lengths.repeat_interleave(groups)


def stickbreaking_decode(
    q, k_cache, v_cache, lengths, *, scale=None, attend_current=False, gate_cache=None, remainder=None,
    skip_epsilon=SKIP_EPSILON, heads_first=False
):
    """One query for each sequence against its cached keys, without gradients: o [B, H, d].

    q: [B, H, d]. k_cache, v_cache: [B, C, G, d] or, with heads_first, [B, G, C, d], contiguous; the query's own key and
    value are in them already, as the last of lengths[b] (int32 [B], on the device). gate_cache: float32 [B, C, H],
    where 0 hides a key.
    """
    batch, heads, d = q.shape
    kind, vector = remainder_of(remainder, q, heads, d)
    require(
        kind != 2 or not heads_first,
        "remainder: a tensor is not possible with heads_first; add rem to a copy, or give [B, C, G, d]",
    )
    q, k_cache, v_cache, lengths = caches_in(q, k_cache, v_cache, lengths, heads_first)
    if gate_cache is not None:
        expected = (batch, k_cache.shape[1], heads)
        require(tuple(gate_cache.shape) == expected, "gate_cache: expected {}, got {}", list(expected), gate_cache.shape)
        if heads_first:
            gate_cache = gate_cache.unflatten(2, (q.shape[0] // batch, -1)).transpose(1, 2).flatten(0, 1)
        gate_cache = gate_cache.float().contiguous()
    o = _ops.call_stickbreaking_decode(
        q, k_cache, v_cache, lengths, gate_cache, vector, d**-0.5 if scale is None else float(scale), attend_current, kind,
        float(skip_epsilon)
    )
    return o.reshape(batch, heads, d)


def softmax_decode(q, k_cache, v_cache, lengths, *, scale=None, bias=None, window=None, heads_first=False):
    """Softmax attention of one query for each sequence; arguments as in stickbreaking_decode and softmax_attention."""
    batch, heads, d = q.shape
    kind, fire = bias_of(bias, q, heads)
    require(kind == 0 or not heads_first, "bias: not with heads_first; give caches of [B, C, G, d]")
    q, k_cache, v_cache, lengths = caches_in(q, k_cache, v_cache, lengths, heads_first)
    o = _ops.call_softmax_decode(q, k_cache, v_cache, lengths, fire, kind, d**-0.5 if scale is None else float(scale), window or 0)
    return o.reshape(batch, heads, d)
