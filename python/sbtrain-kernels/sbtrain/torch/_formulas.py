"""Attention by torch's own operations: what the ops of _ops.py are on a CPU, where it serves to try and to test.

The memory that it takes grows with the square of the longest document. Shapes of one document: q [H, L, d], k and v
[H, L, d] (every query head with its own), f32 or, if q is f64, f64. Gradients are written out, since autograd does
not look into ops. The formulas are those of include/sbtrain/attention.h.
"""
import math

import torch
import torch.nn.functional as F

FIRE_LENGTH = 512.0
FIRE_EPS = 1e-6


def exact(dtype):
    """The type that results are computed in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def documents(tokens, max_seqlen, cu_seqlens):
    """(begin, end) of each document that is not empty."""
    if cu_seqlens is None:
        return [(begin, begin + max_seqlen) for begin in range(0, tokens, max_seqlen)] if tokens else []
    bounds = cu_seqlens.tolist()
    if bounds[0] != 0 or bounds[-1] != tokens or any(a > b for a, b in zip(bounds, bounds[1:])):
        raise ValueError(f"cu_seqlens: expected numbers that rise from 0 to {tokens}, got {bounds}")
    longest = max(b - a for a, b in zip(bounds, bounds[1:]))
    if max_seqlen and longest > max_seqlen:
        raise ValueError(f"cu_seqlens: a document has {longest} tokens, more than max_seqlen {max_seqlen}")
    return [(a, b) for a, b in zip(bounds, bounds[1:]) if a < b]


def heads_of(x, begin, end, heads, dtype):
    """[H, L, d] of x [T, G, d], each shared head once for every head of its group."""
    x = x[begin:end].to(dtype).transpose(0, 1)
    return x.repeat_interleave(heads // x.shape[0], 0)


def sum_groups(dx, groups):
    """[L, G, d], the gradient of shared heads from dx [H, L, d]."""
    return dx.unflatten(0, (groups, -1)).sum(1).transpose(0, 1)


# ---- Stick-breaking ---------------------------------------------------------------------------------------------


def visible_keys(length, attend_current, device):
    return torch.ones(length, length, dtype=torch.bool, device=device).tril(0 if attend_current else -1)


def break_stick(z, visible, gate):
    """(A, log(rem)) from the logits [H, L, L]; gate [H, L] or None."""
    if gate is None:
        log_beta, log_keep = F.logsigmoid(z), F.logsigmoid(-z)
    else:
        f = gate[:, None, :]
        log_beta, log_keep = F.logsigmoid(z) + torch.log(f), torch.log1p(-f * torch.sigmoid(z))
    log_keep = log_keep.masked_fill(~visible, 0.0)
    left = log_keep.flip(-1).cumsum(-1).flip(-1)  # after this key and the nearer ones
    weights = torch.exp(log_beta + left - log_keep).masked_fill(~visible, 0.0)
    return weights, left[..., 0]


def remainder_term(remainder, vector, v):
    """What o receives per unit of rem, [H, L, d] or [H, 1, d]; None: nothing."""
    if remainder == 1:
        return v
    if remainder == 2:
        return vector.to(v.dtype)[:, None, :]
    return None


def stickbreaking_document(q, k, v, gate, vector, scale, attend_current, remainder):
    """(o [H, L, d], log(rem) [H, L])"""
    z = scale * (q @ k.transpose(-1, -2))
    weights, log_rem = break_stick(z, visible_keys(q.shape[1], attend_current, q.device), gate)
    o = weights @ v
    term = remainder_term(remainder, vector, v)
    return (o if term is None else o + log_rem.exp()[..., None] * term), log_rem


def stickbreaking_document_backward(d_o, d_rem, q, k, v, gate, vector, scale, attend_current, remainder):
    """(dq, dk, dv, d_gate [H, L] or None, d_vector [H, d] or None); d_rem [H, L] is the gradient of rem."""
    z = scale * (q @ k.transpose(-1, -2))
    visible = visible_keys(q.shape[1], attend_current, q.device)
    weights, log_rem = break_stick(z, visible, gate)
    rem = log_rem.exp()[..., None]
    dv, d_vector = weights.transpose(-1, -2) @ d_o, None
    if remainder:
        d_rem = d_rem + (d_o * remainder_term(remainder, vector, v)).sum(-1)
        if remainder == 1:
            dv = dv + rem * d_o
        else:
            d_vector = (rem * d_o).sum(1)
    # rem is 1 - sum A, so its gradient is one more term in that of every A.
    g = weights * (d_o @ v.transpose(-1, -2) - d_rem[..., None])
    farther = g.cumsum(-1) - g  # of the keys to the left
    sigma, d_gate = torch.sigmoid(z), None
    if gate is None:
        dz = g - sigma * (g + farther)
    else:
        f = gate[:, None, :]
        kept = 1 - f * sigma
        dz = (1 - sigma) * (g - farther * f * sigma / kept)
        d_gate = (g / f - farther * sigma / kept).masked_fill(~visible, 0.0).sum(1)
    dz = scale * dz.masked_fill(~visible, 0.0)
    return dz @ k, dz.transpose(-1, -2) @ q, dv, d_gate, d_vector


# ---- Softmax ----------------------------------------------------------------------------------------------------


def alibi_slopes(heads):
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * (h + 1) / power) for h in range(power)]
    return slopes + [2 ** (-8 * (2 * h + 1) / (2 * power)) for h in range(heads - power)]


def distances(length, dtype, device):
    """(position of the query [L, 1], query - key [L, L], at least 0)"""
    i = torch.arange(length, dtype=dtype, device=device)
    return i[:, None], (i[:, None] - i[None, :]).clamp(min=0)


class FireBias:
    """The bias of FIRE, [H, L, L], and the gradients of its parameters."""

    def __init__(self, parameters, length, dtype, device):
        self.c, self.m, self.w1, self.b1, self.w2, self.b2 = (x.to(dtype) for x in parameters)
        self.j, self.distance = distances(length, dtype, device)
        self.threshold = torch.maximum(self.j, (self.m * FIRE_LENGTH).abs())
        self.log_distance = torch.log(self.c.abs() * self.distance + 1)
        self.divisor = torch.log(self.c.abs() * self.threshold + 1) + FIRE_EPS
        self.u = self.log_distance / self.divisor
        self.hidden = F.relu(self.u[..., None] * self.w1 + self.b1)  # [L, L, 32]

    def bias(self):
        return (self.hidden @ self.w2.T + self.b2).permute(2, 0, 1)

    def gradients(self, d_bias):
        """Of c, m, w1, b1 and w2; b2 has none."""
        d_bias = d_bias.permute(1, 2, 0)
        d_hidden = (d_bias @ self.w2) * (self.hidden > 0)
        d_w2 = torch.einsum("ijh,ijk->hk", d_bias, self.hidden)
        d_u = (d_hidden * self.w1).sum(-1)
        d_divisor = -d_u * self.u / self.divisor
        sign_c, sign_m = torch.sign(self.c), torch.sign(self.m)
        of_threshold = d_divisor / (self.c.abs() * self.threshold + 1)
        d_c = (d_u / self.divisor * self.distance / (self.c.abs() * self.distance + 1)).sum()
        d_c = sign_c * (d_c + (of_threshold * self.threshold).sum())
        by_m = self.threshold > self.j
        d_m = sign_m * FIRE_LENGTH * (of_threshold * self.c.abs() * by_m).sum()
        return d_c, d_m, (d_hidden * self.u[..., None]).sum((0, 1)), d_hidden.sum((0, 1)), d_w2


def softmax_weights(q, k, scale, bias, window):
    """(weights [H, L, L], lse [H, L])"""
    z = scale * (q @ k.transpose(-1, -2))
    if bias is not None:
        z = z + bias
    length = q.shape[1]
    visible = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
    if window:
        visible = visible & ~visible.new_ones(length, length).tril(-window)
    z = z.masked_fill(~visible, -math.inf)
    lse = torch.logsumexp(z, -1)
    return torch.exp(z - lse[..., None]), lse


def position_bias(kind, fire, heads, length, dtype, device):
    """(bias or None, FireBias or None)"""
    if kind == 1:
        slopes = torch.tensor(alibi_slopes(heads), dtype=dtype, device=device)
        return -slopes[:, None, None] * distances(length, dtype, device)[1], None
    if kind == 2:
        bias = FireBias(fire, length, dtype, device)
        return bias.bias(), bias
    return None, None


def softmax_document(q, k, v, kind, fire, scale, window):
    """(o [H, L, d], lse [H, L])"""
    bias, _ = position_bias(kind, fire, q.shape[0], q.shape[1], q.dtype, q.device)
    weights, lse = softmax_weights(q, k, scale, bias, window)
    return weights @ v, lse


def softmax_document_backward(d_o, q, k, v, kind, fire, scale, window):
    """(dq, dk, dv, gradients of FIRE's parameters or None)"""
    bias, network = position_bias(kind, fire, q.shape[0], q.shape[1], q.dtype, q.device)
    weights, _ = softmax_weights(q, k, scale, bias, window)
    d_weights = d_o @ v.transpose(-1, -2)
    dz = weights * (d_weights - (weights * d_weights).sum(-1, keepdim=True))
    gradients = network.gradients(dz) if network else None
    return scale * dz @ k, scale * dz.transpose(-1, -2) @ q, weights.transpose(-1, -2) @ d_o, gradients
