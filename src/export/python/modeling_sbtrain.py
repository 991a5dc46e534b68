"""The models that sbtrain trains, in plain PyTorch: every attention module with all of its options.

Attention takes memory that grows with the square of the length, as the formulas are written; but stick-breaking
attention of whole sequences on a GPU is computed by sbtrain's kernels, where the package sbtrain-kernels is installed,
or else by flash-linear-attention's, where that is installed and does what is asked (see stickbreaking_op and
stickbreaking_kernel). Shapes: B
sequences, L new tokens of each, K keys (those of the cache and the L new ones), H query heads, G key and
value heads, d channels of a head.

Batches may be padded on either side (attention_mask) and rows may hold several documents
(position_ids that begin again at 0): a token sees the tokens of its own document. With a cache, the new
tokens continue each row's last document.
"""
import functools
import math

import torch
import torch.nn.functional as F
from torch import nn

try:
    from transformers import GenerationMixin, PreTrainedModel
    from transformers.modeling_outputs import CausalLMOutputWithPast

    from .configuration_sbtrain import SbtrainConfig
except ImportError:  # without transformers, or outside of a package, there is SbtrainPlain
    PreTrainedModel = None

HEAD_NORM_EPS = 1e-5
FIRE_HIDDEN = 32
CONV_TAPS = 3
ATTENTION = {}  # the class of each attention module, by its name in configurations


def attention(*names):
    """Makes a class what computes the attention modules of these names. `sbtrain export` looks for them here."""

    def register(module):
        ATTENTION.update(dict.fromkeys(names, module))
        return module

    return register


class SbtrainCache:
    """What generation keeps of the tokens so far: tensors [B, ..., K, ...] of each layer by name."""

    is_compileable = False

    def __init__(self):
        self.documents = None  # [B, K], -1: padding
        self.positions = None  # [B, K]
        self.last_document = None  # [B]
        self.layers = {}  # layer -> {name: tensor}

    def get_seq_length(self, layer_idx=0):
        return 0 if self.documents is None else self.documents.shape[1]

    def append(self, layer, name, x, dim):
        """x with what the layer kept before it; the whole is kept."""
        kept = self.layers.setdefault(layer, {})
        if name in kept:
            x = torch.cat([kept[name], x], dim)
        kept[name] = x
        return x

    def reorder_cache(self, beam_idx):
        def select(x):
            return x.index_select(0, beam_idx.to(x.device))

        self.documents, self.positions = select(self.documents), select(self.positions)
        self.last_document = select(self.last_document)
        for kept in self.layers.values():
            for name in kept:
                kept[name] = select(kept[name])


class Tokens:
    """Where the new tokens stand, and which keys each of them sees."""

    def __init__(self, attention_mask, position_ids, shape, device, cache):
        batch, length = shape
        past = cache.get_seq_length() if cache is not None else 0
        valid = torch.ones(batch, length, dtype=torch.bool, device=device)
        if attention_mask is not None:
            if attention_mask.dim() != 2 or attention_mask.shape[1] not in (length, past + length):
                raise ValueError(
                    f"attention_mask: expected [batch, tokens] or [batch, cached + new tokens], got "
                    f"{list(attention_mask.shape)} for {past} cached and {length} new tokens"
                )
            valid = attention_mask[:, -length:].to(device).bool()
        before = torch.full((batch,), -1, dtype=torch.long, device=device)  # the last position
        document = torch.zeros(batch, dtype=torch.long, device=device)
        if past:
            before = cache.positions.masked_fill(cache.documents < 0, -1)[:, -1]
            before = torch.where(cache.documents[:, -1] < 0, cache.positions.amax(1), before)
            document = cache.last_document
        if position_ids is None:
            positions = before[:, None] + valid.long().cumsum(1)
        else:
            positions = position_ids.to(device).expand(batch, length).long()
        self.positions = positions.clamp(min=0)  # [B, L]
        documents = document[:, None] + ((self.positions == 0) & valid).long().cumsum(1)
        last = documents[:, -1]
        self.documents = documents.masked_fill(~valid, -1)  # [B, L]
        self.key_documents, self.key_positions = self.documents, self.positions
        if cache is not None:
            if past:
                self.key_documents = torch.cat([cache.documents, self.documents], 1)
                self.key_positions = torch.cat([cache.positions, self.positions], 1)
            cache.documents, cache.positions = self.key_documents, self.key_positions
            cache.last_document = last
        keys = past + length
        query = torch.arange(past, keys, device=device)[:, None]
        key = torch.arange(keys, device=device)[None, :]
        same = self.documents[:, :, None] == self.key_documents[:, None, :]
        self.behind = query - key  # [L, K]
        self.visible = (same & (self.key_documents[:, None, :] >= 0) & (self.behind >= 0))[:, None]
        self.longest = int(self.key_positions.max()) + 1

    @functools.cached_property
    def numbers(self):
        """The number of each token's document [B, L], -1 for padding; None where every row is one document."""
        alone = (self.documents == self.documents[:, :1]) & (self.documents >= 0)
        return None if bool(alone.all()) else self.documents

    @functools.cached_property
    def bounds(self):
        """Where documents begin when the rows stand one after the other, and the end of the last: [N + 1]. A run of
        padding counts as a document. None if documents began in earlier calls, or if padding tears one apart."""
        if self.key_documents.shape != self.documents.shape:
            return None
        begins = torch.ones_like(self.documents, dtype=torch.bool)
        begins[:, 1:] = self.documents[:, 1:] != self.documents[:, :-1]
        torn = begins & (self.documents >= 0) & (self.positions != 0)
        if bool(torn[:, 1:].any()):
            return None
        first = begins.flatten().nonzero().flatten()
        return F.pad(first, (0, 1), value=self.documents.numel())


class RMSNorm(nn.Module):
    def __init__(self, width, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x):
        y = x.float()
        y = y * torch.rsqrt((y * y).mean(-1, keepdim=True) + self.eps)
        return (y * self.weight.float()).to(x.dtype)


class LayerNorm(nn.Module):
    def __init__(self, width, eps):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))
        self.eps = eps

    def forward(self, x):
        y = F.layer_norm(x.float(), x.shape[-1:], self.weight.float(), self.bias.float(), self.eps)
        return y.to(x.dtype)


class FeatureKernel(nn.Module):
    """What ReBased's features pass before they are multiplied (arXiv 2402.10644, table 1), without the parts that are
    turned off: (x - mean) / std * weight + bias."""

    def __init__(self, width, options):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width)) if options.get("feature_gamma", True) else None
        self.bias = nn.Parameter(torch.zeros(width)) if options.get("feature_beta", True) else None
        self.norm = options.get("feature_norm", True)

    def forward(self, x):
        weight, bias = (None if p is None else p.float() for p in (self.weight, self.bias))
        if self.norm:
            return F.layer_norm(x.float(), x.shape[-1:], weight, bias, HEAD_NORM_EPS).to(x.dtype)
        y = x.float() if weight is None else x.float() * weight
        return (y if bias is None else y + bias).to(x.dtype)


def make_norm(model, width):
    kind = LayerNorm if model.get("norm", "rmsnorm") == "layernorm" else RMSNorm
    return kind(width, model.get("norm_eps", 1e-5))


# ---- positions


def rotary_frequencies(options, d, longest):
    """The angle of each pair of a head from one position to the next, and the factor of queries and keys.
    `longest` is the length of the longest document, on which dynamic_ntk depends."""
    base, factor = float(options.get("rope_base", 10000.0)), float(options.get("rope_factor", 1.0))
    scaling, trained = options.get("rope_scaling", "none"), options.get("rope_train_length", 0)
    if scaling == "ntk":
        base = base * factor ** (d / (d - 2))
    elif scaling == "dynamic_ntk" and longest > trained:
        base = base * (factor * longest / trained - (factor - 1)) ** (d / (d - 2))
    pair = torch.arange(d // 2, dtype=torch.float64)
    frequency = base ** (-pair / (d // 2))
    if scaling in ("none", "ntk", "dynamic_ntk"):
        return frequency, 1.0
    if scaling == "linear":
        return frequency / factor, 1.0
    if scaling == "yarn":
        fast, slow = options.get("rope_beta_fast", 32.0), options.get("rope_beta_slow", 1.0)
        fast, slow = (d * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(base)) for turns in (fast, slow))
        low, high = max(math.floor(fast), 0), min(math.ceil(slow), d - 1)
        scaled = ((pair - low) / (high - low if high != low else 0.001)).clamp(0, 1)
        amplitude = options.get("rope_attention_factor", 0.0) or 0.1 * math.log(factor) + 1.0
    elif scaling == "llama3":
        low, high = options.get("rope_low_freq_factor", 1.0), options.get("rope_high_freq_factor", 4.0)
        scaled = 1 - ((trained * frequency / (2 * math.pi) - low) / (high - low)).clamp(0, 1)
        amplitude = 1.0
    else:
        raise ValueError(f"rope_scaling: {scaling}")
    return frequency * (1 - scaled + scaled / factor), amplitude


def rotate(x, positions, options, longest):
    """Rotary positions, half-split: x [B, H, K, d], positions [B, K]. Of each head the first rope_fraction of the
    channels turn."""
    rotated = int(x.shape[-1] * options.get("rope_fraction", 1.0))
    if rotated < x.shape[-1]:
        turned = rotate(x[..., :rotated], positions, {**options, "rope_fraction": 1.0}, longest)
        return torch.cat([turned, x[..., rotated:]], -1)
    frequency, amplitude = rotary_frequencies(options, x.shape[-1], longest)
    angle = positions[:, None, :, None].double() * frequency.to(x.device)
    cos, sin = (amplitude * angle.cos()).float(), (amplitude * angle.sin()).float()
    x1, x2 = x.float().chunk(2, -1)
    return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], -1).to(x.dtype)


def alibi_slopes(heads):
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * (h + 1) / power) for h in range(power)]
    return slopes + [2 ** (-8 * (2 * h + 1) / (2 * power)) for h in range(heads - power)]


def distances(tokens):
    """[B, L, K] position of the query minus that of the key, 0 for later keys."""
    between = tokens.positions[:, :, None] - tokens.key_positions[:, None, :]
    return between.clamp(min=0).float()


class Fire(nn.Module):
    """A learned function of the distance (arXiv 2310.04418): [B, H, L, K]."""

    def __init__(self, heads):
        super().__init__()
        self.c = nn.Parameter(torch.tensor([0.1]))
        self.m = nn.Parameter(torch.tensor([1.0]))
        self.w1 = nn.Linear(1, FIRE_HIDDEN)
        self.w2 = nn.Linear(FIRE_HIDDEN, heads)

    def forward(self, tokens, length):
        c, m = self.c.float().abs(), self.m.float().abs()
        threshold = torch.maximum(tokens.positions[:, :, None].float(), m * length)
        u = torch.log(c * distances(tokens) + 1) / (torch.log(c * threshold + 1) + 1e-6)
        hidden = F.relu(u[..., None] * self.w1.weight[:, 0].float() + self.w1.bias.float())
        return (hidden @ self.w2.weight.float().T + self.w2.bias.float()).permute(0, 3, 1, 2)


# ---- how keys are weighed: q [B, H, L, d], k and v [B, H, K, d] -> [B, H, L, d]


def softmax_attention(q, k, v, scale, visible, bias=None):
    z = scale * (q.float() @ k.float().transpose(-1, -2))
    if bias is not None:
        z = z + bias
    # The lowest number instead of -inf: a row of padding sees no keys, and must not become NaN.
    z = z.masked_fill(~visible, torch.finfo(z.dtype).min)
    return (torch.softmax(z, -1) @ v.float()).to(v.dtype)


def stickbreaking_attention(q, k, v, scale, visible, gate=None):
    """(output, remainder [B, H, L, 1]) of arXiv 2410.17980: a key takes sigmoid(z), times its gate, of
    what the keys after it have left of the stick."""
    z = scale * (q.float() @ k.float().transpose(-1, -2))
    log_beta, log_keep = F.logsigmoid(z), F.logsigmoid(-z)
    if gate is not None:  # [B, H, K]
        f = gate[:, :, None, :]
        log_beta = log_beta + torch.log(f)
        log_keep = torch.log1p(-f * torch.sigmoid(z))
    log_keep = log_keep.masked_fill(~visible, 0.0)
    left = log_keep.flip(-1).cumsum(-1).flip(-1)  # after this key and those that follow it
    before = F.pad(left, (0, 1))[..., 1:]
    weights = torch.exp(log_beta + before).masked_fill(~visible, 0.0)
    return (weights @ v.float()).to(v.dtype), torch.exp(left[..., :1]).to(v.dtype)


@functools.lru_cache(maxsize=1)
def sbtrain_stickbreaking():
    """stickbreaking_attention of the package sbtrain-kernels; None where it is not installed."""
    try:
        from sbtrain.torch import stickbreaking_attention as op
    except ImportError:
        return None
    return op


def stickbreaking_op(q):
    """What computes whole sequences of these queries [B, H, L, d] with all options; None: see stickbreaking_kernel."""
    if q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256:
        return sbtrain_stickbreaking()
    return None


@functools.lru_cache(maxsize=1)
def fla_stickbreaking():
    """parallel_stickbreaking_attn of flash-linear-attention 0.6; None where it is not installed."""
    try:
        from fla.ops.stickbreaking_attn import parallel_stickbreaking_attn
    except (ImportError, RuntimeError):
        return None
    return parallel_stickbreaking_attn


def stickbreaking_kernel(q, v, gate):
    """The kernel that computes stick-breaking attention of these tensors; None: plain PyTorch does. The kernel
    has no gate, and wants bfloat16 or float16 and heads of at most 256 channels."""
    small = max(q.shape[-1], v.shape[-1]) <= 256 and q.dtype == v.dtype
    if gate is None and small and q.is_cuda and q.dtype in (torch.bfloat16, torch.float16):
        return fla_stickbreaking()
    return None


def kernel_attention(kernel, q, k, v, scale, attend_current, bounds):
    """stickbreaking_attention by a kernel: q [B, H, L, d], k and v [B, G, L, d], documents by their bounds."""
    batch, _, length, _ = q.shape
    packed = [x.transpose(1, 2).flatten(0, 1)[None] for x in (q, k, v)]
    o, remainder = kernel(*packed, scale=scale, attend_current=attend_current, cu_seqlens=bounds)
    return [x[0].unflatten(0, (batch, length)).transpose(1, 2) for x in (o, remainder[..., None])]


def polynomial_attention(q, k, v, scale, visible, kind):
    """Based (1 + x + x^2 / 2) and ReBased (x^2), normalised by the sum."""
    x = scale * (q.float() @ k.float().transpose(-1, -2))
    s = x * x if kind == "rebased" else 1 + x + x * x / 2
    s = s.masked_fill(~visible, 0.0)
    return ((s @ v.float()) / (s.sum(-1, keepdim=True) + 1e-12)).to(v.dtype)


# ---- modules


@attention("short_conv")
class ShortConv(nn.Module):
    """conv(u) * (W u + b) + u, over three tokens of one document."""

    def __init__(self, model, options):
        super().__init__()
        width = model["width"]
        self.conv = nn.Module()
        self.conv.weight = nn.Parameter(torch.zeros(width, CONV_TAPS))
        self.conv.bias = nn.Parameter(torch.zeros(width))
        self.gate_proj = nn.Linear(width, width)

    def forward(self, u, tokens, layer, cache, shared):
        length = u.shape[1]
        past = u if cache is None else self.last_inputs(u, layer, cache)
        documents = tokens.key_documents[:, -past.shape[1] :]
        conv = self.conv.bias.float().expand(u.shape).clone()
        for back in range(CONV_TAPS):
            x = F.pad(past, (0, 0, back, 0))[:, : past.shape[1]][:, -length:].float()
            d = F.pad(documents, (back, 0), value=-2)[:, : past.shape[1]][:, -length:]
            x = x.masked_fill((d != tokens.documents)[..., None], 0.0)
            conv = conv + x * self.conv.weight[:, CONV_TAPS - 1 - back].float()
        return conv.to(u.dtype) * self.gate_proj(u) + u

    @staticmethod
    def last_inputs(u, layer, cache):
        kept = cache.layers.setdefault(layer, {})
        past = torch.cat([kept["u"], u], 1) if "u" in kept else u
        kept["u"] = past[:, -(CONV_TAPS - 1) :]
        return past


@attention("stickbreaking", "softmax", "coca", "based", "rebased")
class SelfAttention(nn.Module):
    """Every module with queries, keys and values."""

    def __init__(self, model, options):
        super().__init__()
        self.model, self.options = model, options
        self.kind = options.get("type", "stickbreaking")
        self.polynomial = self.kind in ("based", "rebased")
        width, heads = model["width"], model["heads"]
        d = model.get("head_dim", 0) or width // heads
        self.heads, self.head_dim = heads, d
        self.kv_heads = model.get("kv_heads", 0) or heads
        self.key_dim = options.get("feature_dim", 16) if self.polynomial else d
        bias = options.get("qkv_bias", False)
        self.key_name = "t_proj" if self.kind == "coca" else "k_proj"
        self.q_proj = nn.Linear(width, heads * self.key_dim, bias=bias)
        setattr(self, self.key_name, nn.Linear(width, self.kv_heads * self.key_dim, bias=bias))
        self.v_proj = nn.Linear(width, self.kv_heads * d, bias=bias)
        self.o_proj = nn.Linear(heads * d, width, bias=options.get("output_bias", False))
        self.scale = options.get("logit_scale", 0.0) or self.key_dim**-0.5
        self.position = options.get("position", "rope")
        if self.kind == "rebased":
            self.q_norm = FeatureKernel(heads * self.key_dim, options)
            self.k_norm = FeatureKernel(heads * self.key_dim, options)
        elif options.get("qk_norm", False):
            joint = self.joint_norm()
            self.q_norm = RMSNorm(heads * d if joint else d, model.get("norm_eps", 1e-5))
            setattr(self, self.key_norm(), RMSNorm(self.kv_heads * d if joint else d, model.get("norm_eps", 1e-5)))
        if self.kind == "softmax" and self.position == "fire" and not options.get("shared", False):
            self.fire = Fire(heads)
        self.fire_length = options.get("fire_length", 512.0)
        if self.kind == "stickbreaking":
            if options.get("remainder", "none") == "bias":
                self.remainder_bias = nn.Parameter(torch.zeros(heads, d))
            if options.get("forget_gate", False):
                self.forget_gate = nn.Linear(width, heads)
            if options.get("head_norm", False):
                self.head_norm = LayerNorm(heads * d, HEAD_NORM_EPS)

    def joint_norm(self):
        """Whether the norms of queries and keys are over all heads together."""
        scope = self.options.get("qk_norm_scope", "head")
        if scope not in ("head", "joint"):
            raise ValueError(f"qk_norm_scope: {scope}")
        return self.options.get("qk_norm", False) and scope == "joint"

    def key_norm(self):
        return self.key_name.replace("_proj", "_norm")

    def forward(self, x, tokens, layer, cache, shared):
        q, k = self.q_proj(x), getattr(self, self.key_name)(x)
        if self.kind == "rebased":
            q, k = self.q_norm(q), self.k_norm(k)
        elif self.joint_norm():
            q, k = self.q_norm(q), getattr(self, self.key_norm())(k)
        q = q.unflatten(-1, (self.heads, self.key_dim))
        k = k.unflatten(-1, (self.kv_heads, self.key_dim))
        if self.kind != "rebased" and self.options.get("qk_norm", False) and not self.joint_norm():
            q, k = self.q_norm(q), getattr(self, self.key_norm())(k)
        q, k = q.transpose(1, 2), k.transpose(1, 2)
        v = self.v_proj(x).unflatten(-1, (self.kv_heads, self.head_dim)).transpose(1, 2)
        own_value = v
        if cache is not None:
            # Keys are kept as they are projected: how dynamic_ntk rotates them changes with the length.
            k, v = cache.append(layer, "k", k, 2), cache.append(layer, "v", v, 2)
        o = self.mix(x, q, k, v, own_value, tokens, layer, cache, shared)
        return self.o_proj(o.transpose(1, 2).flatten(2))

    def repeated(self, *tensors):
        """Each key and value head once for every query head of its group."""
        groups = self.heads // self.kv_heads
        return [x.repeat_interleave(groups, 1) if groups > 1 else x for x in tensors]

    def mix(self, x, q, k, v, own_value, tokens, layer, cache, shared):
        visible = tokens.visible
        window = self.options.get("window", 0)
        if window:
            visible = visible & (tokens.behind < window)
        if self.kind == "stickbreaking":
            return self.break_stick(x, q, k, v, own_value, tokens, layer, cache)
        k, v = self.repeated(k, v)
        if self.polynomial:
            return polynomial_attention(q, k, v, self.scale, visible, self.kind)
        bias = None
        if self.kind == "coca":
            q, k = self.collinear(q, k, tokens)
        elif self.position == "rope":
            q = rotate(q, tokens.positions, self.options, tokens.longest)
            k = rotate(k, tokens.key_positions, self.options, tokens.longest)
        elif self.position == "alibi":
            slopes = torch.tensor(alibi_slopes(self.heads), device=q.device)
            bias = -slopes[:, None, None] * distances(tokens)[:, None]
        elif self.position == "fire":
            fire = self.fire if hasattr(self, "fire") else shared.self_attn.fire
            bias = fire(tokens, self.fire_length)
        elif self.position != "none":
            raise ValueError(f"position: {self.position}")
        return softmax_attention(q, k, v, self.scale, visible, bias)

    def collinear(self, q, t, tokens):
        """CoCA (arXiv 2309.08646): the query and the key whose product is its logit."""
        t1, t2 = t.chunk(2, -1)
        bar = F.relu((t1 + t2) / 2)

        def rotated(y, positions):
            return rotate(y, positions, self.options, tokens.longest)

        if self.options.get("variant", "official") == "official":
            query = q * rotated(q, tokens.positions)
            return query, rotated(torch.cat([bar, bar], -1), tokens.key_positions)
        q1, q2 = q.chunk(2, -1)
        square = q1 * q1 + q2 * q2
        query = rotated(torch.cat([square, torch.zeros_like(square)], -1), tokens.positions)
        return query, rotated(torch.cat([bar, torch.zeros_like(bar)], -1), tokens.key_positions)

    def broken_stick(self, q, k, v, gate, attend_current, tokens):
        """(o, remainder) of sbtrain's op, of a kernel or of the formula: k and v [B, G, K, d], gate [B, H, K]."""
        op, kernel = stickbreaking_op(q), stickbreaking_kernel(q, v, gate)
        if op is not None and q.shape[2] == k.shape[2]:
            options = {"scale": self.scale, "attend_current": attend_current, "documents": tokens.numbers}
            o, remainder = op(q, k, v, gate=gate, heads_first=True, **options)
            return o, remainder[..., None].to(v.dtype)
        if kernel is not None and tokens.bounds is not None:
            return kernel_attention(kernel, q, k, v, self.scale, attend_current, tokens.bounds)
        visible = tokens.visible if attend_current else tokens.visible & (tokens.behind > 0)
        k, v = self.repeated(k, v)
        return stickbreaking_attention(q, k, v, self.scale, visible, gate)

    def break_stick(self, x, q, k, v, own_value, tokens, layer, cache):
        attend_current = self.options.get("attend_current", False)
        gate = None
        if hasattr(self, "forget_gate"):
            gate = torch.sigmoid(self.forget_gate(x).float()).transpose(1, 2)
            if cache is not None:
                gate = cache.append(layer, "gate", gate, 2)
        o, remainder = self.broken_stick(q, k, v, gate, attend_current, tokens)
        kind = self.options.get("remainder", "none")
        if kind == "value":
            o = o + remainder * self.repeated(own_value)[0]
        elif kind == "bias":
            o = o + remainder * self.remainder_bias[:, None, :]
        elif kind != "none":
            raise ValueError(f"remainder: {kind}")
        if not hasattr(self, "head_norm"):
            return o
        norm = self.head_norm
        y = F.layer_norm(o.float(), o.shape[-1:], eps=norm.eps)
        weight, bias = (p.float().view(self.heads, 1, -1) for p in (norm.weight, norm.bias))
        return (y * weight + bias).to(o.dtype)


class Mlp(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.kind = model.get("mlp", "swiglu")
        width, inner = model["width"], model["inner"]
        if self.kind == "swiglu":
            self.gate_proj = nn.Linear(width, inner, bias=False)
            self.up_proj = nn.Linear(width, inner, bias=False)
            self.down_proj = nn.Linear(inner, width, bias=False)
        elif self.kind in ("gelu", "gelu_tanh"):
            self.up_proj = nn.Linear(width, inner)
            self.down_proj = nn.Linear(inner, width)
        elif self.kind != "none":
            raise ValueError(f"mlp: {self.kind}")

    def forward(self, x):
        if self.kind == "none":
            return x
        if self.kind != "swiglu":
            return self.down_proj(F.gelu(self.up_proj(x), approximate="tanh" if self.kind == "gelu_tanh" else "none"))
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, model, options):
        super().__init__()
        width = model["width"]
        self.residual = model.get("residual_multiplier", 1.0)
        kind = options.get("type", "stickbreaking")
        if kind not in ATTENTION:
            raise ValueError(f"attention type: {kind}")
        position = model.get("norm_position", "input")
        if position not in ("input", "output"):
            raise ValueError(f"norm_position: {position}")
        self.norms_output = position == "output"
        self.parallel = model.get("parallel_residual", False)
        if not self.norms_output:
            self.input_layernorm = make_norm(model, width)
        self.self_attn = ATTENTION[kind](model, options)
        self.post_attention_layernorm = make_norm(model, width)
        if self.norms_output:
            self.post_feedforward_layernorm = make_norm(model, width)
        if model.get("mlp", "swiglu") != "none":
            self.mlp = Mlp(model)

    def forward(self, x, tokens, layer, cache, shared):
        def mlp(x):
            return self.mlp(x) if hasattr(self, "mlp") else x

        if self.norms_output:  # residual_multiplier is 1
            h = x + self.post_attention_layernorm(self.self_attn(x, tokens, layer, cache, shared))
            return h + self.post_feedforward_layernorm(mlp(x if self.parallel else h))
        h = x + self.residual * self.self_attn(self.input_layernorm(x), tokens, layer, cache, shared)
        return h + self.residual * mlp(self.post_attention_layernorm(x if self.parallel else h))


def attention_of(model):
    """The options of each layer."""
    modules = model.get("attention", {})
    modules = [modules] if isinstance(modules, dict) else modules
    return [modules[layer % len(modules)] for layer in range(model["layers"])]


class SbtrainDecoder(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model
        width, options = model["width"], attention_of(model)
        self.embed_tokens = nn.Embedding(model["vocab"], width)
        if model.get("position", "none") == "learned":
            self.embed_positions = nn.Embedding(model["max_positions"], width)
        self.layers = nn.ModuleList(Block(model, o) for o in options)
        self.norm = make_norm(model, width)
        if any(o.get("position") == "fire" and o.get("shared", False) for o in options):
            self.shared = nn.Module()
            self.shared.self_attn = nn.Module()
            self.shared.self_attn.fire = Fire(model["heads"])

    def forward(self, input_ids, attention_mask=None, position_ids=None, cache=None, embeddings=None):
        x = self.embed_tokens(input_ids) if embeddings is None else embeddings
        tokens = Tokens(attention_mask, position_ids, x.shape[:2], x.device, cache)
        x = x * self.model.get("embedding_multiplier", 1.0)
        if hasattr(self, "embed_positions"):
            if tokens.longest > self.embed_positions.num_embeddings:
                raise ValueError(
                    f"{tokens.longest} tokens are more than the model's "
                    f"{self.embed_positions.num_embeddings} learned positions"
                )
            x = x + self.embed_positions(tokens.positions)
        shared = getattr(self, "shared", None)
        for layer, block in enumerate(self.layers):
            x = block(x, tokens, layer, cache, shared)
        return self.norm(x)


def logits_of(owner, model, hidden):
    """Logits of a module that has `model` (SbtrainDecoder) and, if they are not tied, `lm_head`."""
    table = owner.model.embed_tokens if model.get("tied", True) else owner.lm_head
    return model.get("logits_multiplier", 1.0) * F.linear(hidden, table.weight)


class SbtrainPlain(nn.Module):
    """The language model without transformers: SbtrainPlain(config["sbtrain"]), with the tensors of
    model.safetensors as its state."""

    def __init__(self, model):
        super().__init__()
        self.options = model
        self.model = SbtrainDecoder(model)
        if not model.get("tied", True):
            self.lm_head = nn.Linear(model["width"], model["vocab"], bias=False)

    def forward(self, input_ids, attention_mask=None, position_ids=None, cache=None):
        hidden = self.model(input_ids, attention_mask, position_ids, cache)
        return logits_of(self, self.options, hidden)


if PreTrainedModel is not None:

    class SbtrainForCausalLM(PreTrainedModel, GenerationMixin):
        config_class = SbtrainConfig
        base_model_prefix = "model"
        main_input_name = "input_ids"
        supports_gradient_checkpointing = False
        _no_split_modules = ["Block"]

        def __init__(self, config):
            super().__init__(config)
            self.model = SbtrainDecoder(config.sbtrain)
            # A tied head has no module of its own, so that nothing has to be tied after loading.
            if not config.sbtrain.get("tied", True):
                self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
            self.post_init()

        @classmethod
        def _supports_default_dynamic_cache(cls):
            return False  # forward() makes an SbtrainCache

        def _init_weights(self, module):
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=self.config.sbtrain.get("init_std", 0.02))

        def get_input_embeddings(self):
            return self.model.embed_tokens

        def set_input_embeddings(self, value):
            self.model.embed_tokens = value

        def get_output_embeddings(self):
            return getattr(self, "lm_head", None)

        def set_output_embeddings(self, value):
            self.lm_head = value

        def prepare_inputs_for_generation(self, input_ids, past_key_values=None, attention_mask=None, **kwargs):
            past = past_key_values.get_seq_length() if past_key_values is not None else 0
            inputs = {"attention_mask": attention_mask, "past_key_values": past_key_values, "use_cache": kwargs.get("use_cache")}
            if past == 0 and kwargs.get("inputs_embeds") is not None:
                return {"inputs_embeds": kwargs["inputs_embeds"], **inputs}
            return {"input_ids": input_ids[:, past:], **inputs}

        def forward(
            self,
            input_ids=None,
            attention_mask=None,
            position_ids=None,
            past_key_values=None,
            inputs_embeds=None,
            labels=None,
            use_cache=None,
            logits_to_keep=0,
            return_dict=None,
            **kwargs,
        ):
            if past_key_values is not None and not isinstance(past_key_values, SbtrainCache):
                raise ValueError("past_key_values must be the SbtrainCache of an earlier call")
            if past_key_values is None and use_cache and not self.training:
                past_key_values = SbtrainCache()
            hidden = self.model(input_ids, attention_mask, position_ids, past_key_values, inputs_embeds)
            keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            logits = logits_of(self, self.config.sbtrain, hidden[:, keep])
            loss = None
            if labels is not None:
                shifted = labels[:, 1:].to(logits.device)
                loss = F.cross_entropy(logits[:, :-1].float().flatten(0, 1), shifted.flatten(), ignore_index=-100)
            if return_dict is False:
                return tuple(x for x in (loss, logits, past_key_values) if x is not None)
            return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=past_key_values)
