#!/usr/bin/env python3
"""The model of sbtrain in plain PyTorch, straight from its formulas, to compare with.

    pytorch_reference.py --model model.json --weights weights.safetensors --batch batch.json \
        --gradients gradients.safetensors

model.json      the `model` part of a configuration (layers, width, inner, heads, attention, ...)
weights, gradients   float32 tensors under their checkpoint names ("model.layers.0. ...")
batch.json      lists `tokens`, `targets` (-1 is ignored), `positions`, `cu_seqlens`; optionally
                `loss`, the mean over valid targets that sbtrain found
logits          optionally, with --logits: one float32 tensor "logits" [T, V]
Compares the loss, the logits and every gradient: ||ours - PyTorch|| / ||PyTorch|| <= --tolerance.
--device says where PyTorch computes. With --stored bfloat16 the model is computed a second time, and
every tensor that a run keeps in memory, and its gradient, is rounded to that type. The error of this
second computation, the largest over all layers, is what rounding alone causes: where 1.5 times this
error exceeds the tolerance, it is the bound instead.

With --folders FOLDER... in place of these files, each folder has them under the names above, and gets a file `log` with
what would be printed and a file `code` with the exit status: PyTorch takes longer to load than to compute a small model.

Exit status: 0 equal within the tolerance, 1 not equal, 77 PyTorch is not installed.
With --write FILE the gradients of PyTorch are written instead of compared.
"""
import argparse
import contextlib
import json
import math
import pathlib
import re
import struct
import sys

try:
    import numpy as np
    import torch
    import torch.nn.functional as F
except ImportError as error:
    print(f"skipped: {error} (install python3-torch)")
    sys.exit(77)


def read_safetensors(path):
    """{name: array}: 8 bytes of header length, a JSON header, then the tensors' bytes."""
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
        data = file.read()
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] != "F32":
            raise ValueError(f"{path}: {name} is {entry['dtype']}, expected F32")
        begin, end = entry["data_offsets"]
        tensors[name] = np.frombuffer(data[begin:end], np.float32).reshape(entry["shape"]).copy()
    return tensors


def write_safetensors(path, tensors):
    header, data = {}, b""
    for name, array in tensors.items():
        raw = np.ascontiguousarray(array, np.float32).tobytes()
        header[name] = {
            "dtype": "F32",
            "shape": list(array.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + data)


class Rounded(torch.autograd.Function):
    """Rounds a tensor, and its gradient, as if it passed through memory as bfloat16."""

    @staticmethod
    def forward(_, x):
        return x.to(torch.bfloat16).to(x.dtype)

    @staticmethod
    def backward(_, dx):
        return dx.to(torch.bfloat16).to(dx.dtype)


ROUND = False  # set while the model is computed as --stored says


def stored(x):
    """x as a run keeps it in memory."""
    return Rounded.apply(x) if ROUND else x


def rmsnorm(x, weight, eps):
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def rope(x_THd, positions_T, frequency):
    """Half-split rotation: (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin)."""
    half = x_THd.shape[-1] // 2
    angle = positions_T.double()[:, None, None] * frequency
    cos, sin = angle.cos().to(x_THd.dtype), angle.sin().to(x_THd.dtype)
    x1, x2 = x_THd[..., :half], x_THd[..., half:]
    return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], -1)


def stickbreaking(q, k, v, scale, config, gate=None, remainder_bias=None):
    """One document: q, k, v [H, L, d], gate [H, L], remainder_bias [H, d] -> o [H, L, d].

    z_ij = scale q_j.k_i; beta_ij = f_i sigmoid(z_ij); A_ij = beta_ij prod_{i<k<j} (1 - beta_kj).
    Rows below are tokens j, columns keys i.
    """
    length = q.shape[1]
    z = scale * q @ k.transpose(1, 2)
    log_beta = F.logsigmoid(z)
    log_keep = F.logsigmoid(-z)  # log (1 - beta)
    if gate is not None:
        f = gate[:, None, :]
        log_beta = log_beta + torch.log(f)
        log_keep = torch.log1p(-f * torch.sigmoid(z))
    seen = torch.ones(length, length, dtype=torch.bool, device=z.device)
    seen = torch.tril(seen, 0 if config.get("attend_current", False) else -1)
    log_keep = torch.where(seen, log_keep, torch.zeros(()).to(z))
    # Sum over the keys after i: the inclusive sum from the right, minus the term of the key itself.
    between = log_keep.flip(-1).cumsum(-1).flip(-1) - log_keep
    a = torch.where(seen, torch.exp(log_beta + between), torch.zeros(()).to(z))
    o = a @ v
    remainder = torch.exp(log_keep.sum(-1))[..., None]
    kind = config.get("remainder", "none")
    if kind == "value":
        o = o + remainder * v
    elif kind == "bias":
        o = o + remainder * remainder_bias[:, None, :]
    elif kind != "none":
        raise ValueError(f"remainder: {kind}")
    return o


def softmax(q, k, v, scale, window=0, bias=None):
    """One document, causal: q, k, v [H, L, d], bias [H, L, L] -> o [H, L, d]."""
    length = q.shape[1]
    z = scale * q @ k.transpose(1, 2)
    if bias is not None:
        z = z + bias
    seen = torch.tril(torch.ones(length, length, dtype=torch.bool, device=z.device))
    if window:
        seen = torch.triu(seen, 1 - window)
    return torch.softmax(z.masked_fill(~seen, -math.inf), -1) @ v


def distances(length, like):
    """(query j, distance j - i), both [L, L] with rows j; what is not seen has distance 0."""
    position = torch.arange(length, dtype=like.dtype, device=like.device)
    return position[:, None], (position[:, None] - position[None, :]).clamp(min=0)


def alibi(heads, length, like):
    """-m_h (j - i); the slopes as the authors' code has them."""

    def powers(n):
        return [2 ** (-8 * (h + 1) / n) for h in range(n)]

    power = 2 ** math.floor(math.log2(heads))
    slopes = powers(power) + powers(2 * power)[0::2][: heads - power]
    return -torch.tensor(slopes, dtype=like.dtype, device=like.device)[:, None, None] * distances(length, like)[1]


def fire(w, prefix, length, like, reach):
    """MLP(psi(j - i) / (psi(max(j, |m L0|)) + eps)), psi(x) = log(|c x| + 1); `reach` is L0."""
    if prefix + "fire.c" not in w:  # one network for the layers without their own
        prefix = "model.shared.self_attn."
    c, m = w[prefix + "fire.c"], w[prefix + "fire.m"]
    query, distance = distances(length, like)
    threshold = torch.abs(m * reach)
    normaliser = torch.log(torch.abs(c * torch.maximum(query, threshold)) + 1) + 1e-6
    u = (torch.log(torch.abs(c * distance) + 1) / normaliser)[..., None]
    hidden = F.relu(u @ w[prefix + "fire.w1.weight"].T + w[prefix + "fire.w1.bias"])
    bias = (hidden @ w[prefix + "fire.w2.weight"].T + w[prefix + "fire.w2.bias"]).permute(2, 0, 1)
    if bias.requires_grad:
        bias.register_hook(lambda gradient: note_terms(prefix + "fire.w2.weight", gradient.abs(), hidden.detach()))
    return bias


# Of the gradients of FIRE's last weights, the sums of the absolute values of what is summed to them. Softmax ignores a
# constant, so that of a hidden unit that is nearly constant the gradient is what large terms leave of each other.
TERMS = {}


def note_terms(name, gradient_HTT, hidden_TTK):
    terms_HK = torch.einsum("hij,ijk->hk", gradient_HTT, hidden_TTK)
    TERMS[name] = TERMS.get(name, 0) + terms_HK.cpu().numpy().astype(np.float64)


def polynomial(q, k, v, kind):
    """Based and ReBased, one document: q, k [H, L, f], v [H, L, e] -> o [H, L, e]."""
    x = q @ k.transpose(1, 2) / math.sqrt(q.shape[-1])
    s = torch.tril(x * x if kind == "rebased" else 1 + x + x * x / 2)
    return (s @ v) / (s.sum(-1, keepdim=True) + 1e-12)


def by_document(batch, function, *tensors):
    """function(tensors [H, L, ...]) of each document's tensors [T, H, ...], put together again."""
    bounds = batch["cu_seqlens"]
    outputs = []
    for begin, end in zip(bounds[:-1], bounds[1:]):
        if begin < end:
            document = [x[begin:end].transpose(0, 1) for x in tensors]
            outputs.append(function(*document).transpose(0, 1))
    return torch.cat(outputs)


def low_frequencies_scaled(frequency, config, d):
    """yarn (arXiv 2309.00071) and llama3 (arXiv 2407.21783): the share of each frequency that is divided by
    rope_factor, pair by pair."""
    trained, base = config["rope_train_length"], config.get("rope_base", 10000.0)
    share = []
    for pair, theta in enumerate(frequency.tolist()):
        turns = trained * theta / (2 * math.pi)
        if config["rope_scaling"] == "llama3":
            low, high = config.get("rope_low_freq_factor", 1.0), config.get("rope_high_freq_factor", 4.0)
            share.append(0.0 if turns >= high else 1.0 if turns <= low else (high - turns) / (high - low))
            continue
        fast, slow = (
            d * math.log(trained / (beta * 2 * math.pi)) / (2 * math.log(base))
            for beta in (config.get("rope_beta_fast", 32.0), config.get("rope_beta_slow", 1.0))
        )
        first, last = max(math.floor(fast), 0), min(math.ceil(slow), d - 1)
        if first == last:
            last += 0.001
        share.append(min(max((pair - first) / (last - first), 0.0), 1.0))
    share = torch.tensor(share, dtype=frequency.dtype, device=frequency.device)
    return (1 - share) * frequency + share * frequency / config.get("rope_factor", 1.0)


def rope_of(x_THd, config, batch):
    """rope() with rope_scaling; the length is that of the longest document. Of each head the first rope_fraction of
    the channels turn."""
    turned = int(x_THd.shape[-1] * config.get("rope_fraction", 1.0))
    if turned < x_THd.shape[-1]:
        whole = {**config, "rope_fraction": 1.0}
        return torch.cat([rope_of(x_THd[..., :turned], whole, batch), x_THd[..., turned:]], -1)
    base, positions = config.get("rope_base", 10000.0), batch["positions"]
    scaling, factor = config.get("rope_scaling", "none"), config.get("rope_factor", 1.0)
    d = x_THd.shape[-1]
    length, trained = int(positions.max()) + 1, config.get("rope_train_length", 0)
    amplitude = 1.0
    if scaling == "linear":
        positions = positions / factor
    elif scaling == "ntk":
        base = base * factor ** (d / (d - 2))
    elif scaling == "dynamic_ntk" and length > trained:
        base = base * (factor * length / trained - (factor - 1)) ** (d / (d - 2))
    frequency = base ** (-torch.arange(0, d, 2, dtype=torch.float64, device=x_THd.device) / d)
    if scaling in ("yarn", "llama3"):
        frequency = low_frequencies_scaled(frequency, config, d)
    if scaling == "yarn":
        amplitude = config.get("rope_attention_factor", 0.0) or 0.1 * math.log(factor) + 1
    return amplitude * rope(x_THd, positions, frequency)


def coca(q, t, config, batch):
    """The query and key of CoCA: their dot product is its logit."""
    half = q.shape[-1] // 2
    bar = F.relu((t[..., :half] + t[..., half:]) / 2)
    if config.get("variant", "official") == "official":
        return q * rope_of(q, config, batch), rope_of(torch.cat([bar, bar], -1), config, batch)
    square = q[..., :half] ** 2 + q[..., half:] ** 2
    zero = torch.zeros_like(bar)
    return (
        rope_of(torch.cat([square, zero], -1), config, batch),
        rope_of(torch.cat([bar, zero], -1), config, batch),
    )


def short_conv(u_TD, w, prefix, batch):
    """conv3(u) * (W u + b) + u, the convolution causal and within documents."""
    weight = w[prefix + "conv.weight"]

    def convolve(u_1LD):
        padded = F.pad(u_1LD.transpose(1, 2), (2, 0))
        c = F.conv1d(padded, weight[:, None, :], w[prefix + "conv.bias"], groups=weight.shape[0])
        return c.transpose(1, 2)

    gate = stored(u_TD @ w[prefix + "gate_proj.weight"].T) + w[prefix + "gate_proj.bias"]
    return stored(by_document(batch, convolve, u_TD[:, None, :])[:, 0] * gate + u_TD)


def project(x_TD, w, name):
    y = stored(x_TD @ w[f"{name}.weight"].T)
    return stored(y + w[f"{name}.bias"]) if f"{name}.bias" in w else y


def feature_kernel(x, w, name, config):
    """ReBased's (x - mean) / std * gamma + beta, without the parts that are turned off."""
    gamma = w[f"{name}.weight"] if config.get("feature_gamma", True) else torch.ones_like(x[0])
    beta = w[f"{name}.bias"] if config.get("feature_beta", True) else torch.zeros_like(x[0])
    if config.get("feature_norm", True):
        return stored(F.layer_norm(x, x.shape[-1:], gamma, beta))
    return stored(x * gamma + beta)


def polynomial_attention(x_TD, w, prefix, config, model, batch):
    kind = config["type"]
    heads = model["heads"]
    q, k, v = (project(x_TD, w, f"{prefix}{name}_proj") for name in "qkv")
    if kind == "rebased":
        q, k = (feature_kernel(x, w, f"{prefix}{n}_norm", config) for n, x in (("q", q), ("k", k)))
    split = [x.view(x.shape[0], heads, -1) for x in (q, k, v)]
    return stored(by_document(batch, lambda *t: polynomial(*t, kind), *split).flatten(1))


def attention(x_TD, w, prefix, config, model, batch):
    kind = config.get("type", "stickbreaking")
    if kind == "short_conv":
        return short_conv(x_TD, w, prefix, batch)
    if kind in ("based", "rebased"):
        return polynomial_attention(x_TD, w, prefix, config, model, batch)
    heads = model["heads"]
    tokens, width = x_TD.shape
    d = model.get("head_dim", 0) or width // heads
    key = "t" if kind == "coca" else "k"
    q, k, v = (project(x_TD, w, f"{prefix}{name}_proj") for name in ("q", key, "v"))
    eps = model.get("norm_eps", 1e-5)
    joint = config.get("qk_norm_scope", "head") == "joint"
    if config.get("qk_norm", False) and joint:
        q = stored(rmsnorm(q, w[f"{prefix}q_norm.weight"], eps))
        k = stored(rmsnorm(k, w[f"{prefix}{key}_norm.weight"], eps))
    q, k, v = (x.view(tokens, -1, d) for x in (q, k, v))
    if config.get("qk_norm", False) and not joint:
        q = stored(rmsnorm(q, w[f"{prefix}q_norm.weight"], eps))
        k = stored(rmsnorm(k, w[f"{prefix}{key}_norm.weight"], eps))
    scale = config.get("logit_scale", 0) or d**-0.5
    gate = bias = None
    position = config.get("position", "rope")
    if kind == "softmax":
        if position == "rope":
            q, k = (stored(rope_of(x, config, batch)) for x in (q, k))
        elif position not in ("alibi", "fire", "none"):
            raise ValueError(f"position: {position}")
    elif kind == "coca":
        q, k = (stored(x) for x in coca(q, k, config, batch))
    elif kind == "stickbreaking":
        if config.get("forget_gate", False):
            gate = torch.sigmoid(
                x_TD @ w[f"{prefix}forget_gate.weight"].T + w[f"{prefix}forget_gate.bias"]
            )
        if config.get("remainder", "none") == "bias":
            bias = w[f"{prefix}remainder_bias"].view(heads, d)
    else:
        raise ValueError(f"attention type: {kind}")

    # Each head of keys and values serves heads / kv_heads heads of queries that follow each other.
    group = heads // (model.get("kv_heads", 0) or heads)
    if group > 1:
        k, v = (stored(x.repeat_interleave(group, 1)) for x in (k, v))
    outputs = []
    bounds = batch["cu_seqlens"]
    for begin, end in zip(bounds[:-1], bounds[1:]):
        if begin == end:
            continue
        document = [x[begin:end].transpose(0, 1) for x in (q, k, v)]
        if kind in ("softmax", "coca"):
            distance_bias = None
            if position == "alibi":
                distance_bias = alibi(heads, end - begin, q)
            elif position == "fire":
                distance_bias = fire(w, prefix, end - begin, q, config.get("fire_length", 512.0))
            o = softmax(*document, scale, config.get("window", 0), distance_bias)
        else:
            f = None if gate is None else gate[begin:end].T
            o = stickbreaking(*document, scale, config, f, bias)
        outputs.append(o.transpose(0, 1))
    o = stored(torch.cat(outputs))

    if kind == "stickbreaking" and config.get("head_norm", False):
        o = F.layer_norm(o, (d,), eps=model.get("norm_eps", 1e-5))
        o = o * w[f"{prefix}head_norm.weight"].view(heads, d)
        o = o + w[f"{prefix}head_norm.bias"].view(heads, d)
    return stored(o).reshape(tokens, heads * d)


def normalise(x, w, name, model):
    eps = model.get("norm_eps", 1e-5)
    if model.get("norm", "rmsnorm") == "layernorm":
        return stored(F.layer_norm(x, x.shape[-1:], w[name + ".weight"], w[name + ".bias"], eps))
    return stored(rmsnorm(x, w[name + ".weight"], eps))


def gelu(z, kind):
    """x Phi(x), or the tanh form of GPT-2."""
    if kind == "gelu":
        return F.gelu(z)
    return 0.5 * z * (1 + torch.tanh(math.sqrt(2 / math.pi) * (z + 0.044715 * z**3)))


def mlp(x, w, prefix, model):
    kind = model.get("mlp", "swiglu")
    if kind == "none":
        return x
    up = stored(x @ w[prefix + "up_proj.weight"].T)
    if kind != "swiglu":
        inner = stored(gelu(up + w[prefix + "up_proj.bias"], kind))
        return inner @ w[prefix + "down_proj.weight"].T + w[prefix + "down_proj.bias"]
    gate = stored(x @ w[prefix + "gate_proj.weight"].T)
    return stored(F.silu(gate) * up) @ w[prefix + "down_proj.weight"].T


def logits_of(w, model, batch):
    """[T, V]"""
    residual = model.get("residual_multiplier", 1.0)
    modules = model.get("attention", [{}])
    if isinstance(modules, dict):
        modules = [modules]
    embedding = w["model.embed_tokens.weight"]
    x = stored(model.get("embedding_multiplier", 1.0) * embedding[batch["tokens"]])
    if model.get("position", "none") == "learned":
        x = stored(x + w["model.embed_positions.weight"][batch["positions"]])
    for layer in range(model["layers"]):
        prefix = f"model.layers.{layer}."
        outputs = model.get("norm_position", "input") == "output"
        block_input = x
        norm = x if outputs else normalise(x, w, prefix + "input_layernorm", model)
        config = modules[layer % len(modules)]
        mix = attention(norm, w, prefix + "self_attn.", config, model, batch)
        if config.get("type") != "short_conv":
            mix = mix @ w[prefix + "self_attn.o_proj.weight"].T
            if config.get("output_bias", False):
                mix = mix + w[prefix + "self_attn.o_proj.bias"]
        if outputs:
            x = stored(x + normalise(stored(mix), w, prefix + "post_attention_layernorm", model))
        else:
            x = stored(x + residual * mix)
        source = block_input if model.get("parallel_residual", False) else x
        if outputs:
            y = stored(mlp(source, w, prefix + "mlp.", model))
            x = stored(x + normalise(y, w, prefix + "post_feedforward_layernorm", model))
        else:
            norm = normalise(source, w, prefix + "post_attention_layernorm", model)
            x = stored(x + residual * mlp(norm, w, prefix + "mlp.", model))
    x = normalise(x, w, "model.norm", model)
    head = embedding if model.get("tied", True) else w["lm_head.weight"]
    return stored(model.get("logits_multiplier", 1.0) * x @ head.T)


def relative_error(ours, reference):
    norm = np.linalg.norm(reference)
    return float(np.linalg.norm(ours - reference) / norm) if norm else float(np.linalg.norm(ours))


def errors(ours, reference):
    """Relative error of each tensor."""
    return {name: relative_error(ours[name].astype(np.float64), clean(name, reference)) for name in reference}


def clean(name, reference):
    theirs = reference[name].astype(np.float64)
    if name.endswith("fire.w2.bias"):
        theirs = np.zeros_like(theirs)  # what rounding leaves: softmax ignores a constant
    return theirs


def compare(ours, reference, tolerance, rounded=None):
    """Prints one line for each tensor; whether all agree. `rounded` holds the errors that rounding
    makes."""
    good = True
    for name in sorted(set(ours) | set(reference)):
        if name not in ours or name not in reference:
            print(f"{name}: only {'sbtrain' if name in ours else 'PyTorch'} has it")
            good = False
            continue
        if ours[name].shape != reference[name].shape:
            print(f"{name}: shape {ours[name].shape}, PyTorch {reference[name].shape}")
            good = False
            continue
        error = relative_error(ours[name].astype(np.float64), clean(name, reference))
        bound = max(tolerance, 1.5 * rounded[name]) if rounded else tolerance
        if name in TERMS and not rounded:  # and what rounding one of the terms changes
            bound += 2**-24 * np.linalg.norm(TERMS[name]) / np.linalg.norm(reference[name])
        agrees = error <= bound  # false for NaN
        good &= agrees
        beside = f", of rounding {rounded[name]:.2e}" if rounded else ""
        print(f"{name}: relative error {error:.2e}{beside}{'' if agrees else '  TOO LARGE'}")
    return good


def run(w, model, batch):
    """Logits and loss; the gradients are in w."""
    logits = logits_of(w, model, batch)
    loss = F.cross_entropy(logits, batch["targets"], ignore_index=-1)  # mean over valid targets
    loss.backward()
    return logits, loss


def rounding_errors(w, model, batch, logits, gradients):
    """Errors of logits and gradients where tensors are stored as bfloat16."""
    global ROUND
    ROUND = True
    # Gradients of weights are kept in float32: only their values are rounded.
    copies = {name: x.detach().to(torch.bfloat16).to(x.dtype).requires_grad_() for name, x in w.items()}
    rounded, _ = run(copies, model, batch)
    ROUND = False
    found = {name: x.grad.cpu().numpy() for name, x in copies.items()}
    each = errors({"logits": rounded.detach().cpu().numpy()}, logits) | errors(found, gradients)
    # The error of a tensor with few elements is largely chance: that of a gate of one head is a single
    # number. So all layers share the worst of their errors, and so do a gate's weight and bias, which are
    # sums of the same terms, and the tensors of FIRE's network.
    def kind(name):
        return re.sub(r"fire\..*", "fire", re.sub(r"forget_gate\..*", "forget_gate", re.sub(r"\.\d+\.", ".", name)))

    kinds = {name: kind(name) for name in each}
    worst = {}
    for name, error in each.items():
        worst[kinds[name]] = max(worst.get(kinds[name], 0.0), error)
    return {name: worst[kinds[name]] for name in each}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model")
    parser.add_argument("--weights")
    parser.add_argument("--batch")
    parser.add_argument("--folders", nargs="+", type=pathlib.Path)
    parser.add_argument("--gradients", help="of sbtrain, to compare")
    parser.add_argument("--logits", help="of sbtrain, to compare")
    parser.add_argument("--write", help="write PyTorch's gradients to this file")
    parser.add_argument("--tolerance", type=float, default=1e-4)
    parser.add_argument("--loss-tolerance", type=float, help="of the loss alone")
    parser.add_argument("--stored", choices=["bfloat16"], help="what a run keeps its tensors in")
    parser.add_argument("--device", choices=["cpu", "cuda", "auto"], default="cpu")
    parser.add_argument("--dtype", choices=["float32", "float64"], default="float32")
    arguments = parser.parse_args()
    if not arguments.folders:
        if not (arguments.model and arguments.weights and arguments.batch):
            parser.error("--model, --weights and --batch, or --folders, are needed")
        return check(arguments)
    for folder in arguments.folders:
        arguments.model, arguments.batch = folder / "model.json", folder / "batch.json"
        for name in ("weights", "gradients", "logits"):
            setattr(arguments, name, folder / f"{name}.safetensors")
        with open(folder / "log", "w") as log, contextlib.redirect_stdout(log):
            code = check(arguments)
        (folder / "code").write_text(str(code))
    return 0


def check(arguments):
    TERMS.clear()
    with open(arguments.model) as file:
        model = json.load(file)
    with open(arguments.batch) as file:
        raw = json.load(file)
    dtype = getattr(torch, arguments.dtype)
    device = arguments.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cuda.matmul.allow_tf32 = False
    w = {
        name: torch.from_numpy(array).to(device, dtype).requires_grad_()
        for name, array in read_safetensors(arguments.weights).items()
    }
    batch = {
        name: torch.tensor(raw[name], device=device) for name in ("tokens", "targets", "positions")
    }
    batch["cu_seqlens"] = raw["cu_seqlens"]

    logits, loss = run(w, model, batch)
    unused = [name for name, tensor in w.items() if tensor.grad is None]
    if unused:
        print(f"the model does not use: {', '.join(unused)}")
        return 1
    reference = {name: tensor.grad.cpu().numpy() for name, tensor in w.items()}
    ours = f", sbtrain {raw['loss']:.7f}" if "loss" in raw else ""
    print(f"loss: PyTorch on {device} {loss.item():.7f}{ours}")

    if arguments.write:
        write_safetensors(arguments.write, reference)
    theirs = {"logits": logits.detach().cpu().numpy()}
    rounded = rounding_errors(w, model, batch, theirs, reference) if arguments.stored else None
    good = True
    if "loss" in raw:
        tolerance = arguments.loss_tolerance or arguments.tolerance
        good = abs(raw["loss"] - loss.item()) <= tolerance * abs(loss.item())
    if arguments.logits:
        good &= compare(read_safetensors(arguments.logits), theirs, arguments.tolerance, rounded)
    if arguments.gradients:
        good &= compare(read_safetensors(arguments.gradients), reference, arguments.tolerance, rounded)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
