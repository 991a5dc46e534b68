"""Stick-breaking attention for models of transformers:

    import sbtrain.torch.transformers
    sbtrain.torch.transformers.register()
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sbtrain_stickbreaking")

It is for models whose attention does not rotate queries and keys, such as SmolLM3 with every no_rope_layers 0: order is
part of stick-breaking. A model that rotates them is computed too, and warned about once. `attend_current` of the
model's configuration lets a token see itself; without it a token sees those before it. Batches padded on either side,
packed rows (position_ids), caches that grow and static ones, and generate() work.
"""
import torch
import torch.nn.functional as F

from ._attention import require, stickbreaking_attention, stickbreaking_decode
from ._cuda import warn_once

NAME = "sbtrain_stickbreaking"
PADDING, UNWRITTEN = -1, -2  # in place of a document's number


def stickbreaking_mask(
    batch_size,
    q_length,
    kv_length,
    q_offset=0,
    kv_offset=0,
    mask_function=None,
    attention_mask=None,
    device=None,
    **kwargs,
):
    """What transformers calls a mask: the number of each key's document [B, keys], or None if there is nothing to say
    but that a query sees the keys before it."""
    from transformers.masking_utils import causal_mask_function

    require(not isinstance(kv_offset, int) or kv_offset == 0, f"{NAME}: windows and chunks of keys are not possible")
    packed = mask_function is not None and mask_function is not causal_mask_function
    whole = isinstance(q_offset, int) and q_offset + q_length == kv_length
    if attention_mask is not None:
        device = attention_mask.device
        # One look at the device in each pass, where that is possible, saves sorting the tokens in each layer.
        if whole and not is_traced(device) and bool(attention_mask.all()):
            attention_mask = None
    if attention_mask is None and whole and not packed:
        return None
    key = torch.arange(kv_length, device=device)
    documents = key.new_zeros(batch_size, kv_length)
    if packed:
        row = torch.arange(batch_size, device=device)[:, None]
        same = mask_function(row, torch.zeros_like(row), key[None], (key - 1).clamp(min=0)[None])
        documents = (~same).expand(batch_size, kv_length).long().cumsum(1)
    if attention_mask is not None:
        valid = F.pad(attention_mask[:, :kv_length].bool(), (0, max(kv_length - attention_mask.shape[1], 0)))
        documents = documents.masked_fill(~valid, PADDING)
    return documents if whole else documents.masked_fill(key >= q_offset + q_length, UNWRITTEN)


def is_traced(device):
    return torch.compiler.is_compiling() or (device.type == "cuda" and torch.cuda.is_current_stream_capturing())


def check_options(module, dropout, options):
    require(not dropout, f"{NAME}: attention_dropout is {dropout}, but stick-breaking attention has none; set it to 0")
    for name in ("sliding_window", "softcap", "s_aux"):
        require(options.get(name) is None, f"{NAME}: {name} is not possible")
    rotates = getattr(module.config, "rope_parameters", None) and getattr(module, "use_rope", True)
    if rotates and not torch.compiler.is_compiling():
        warn_once(
            f"{NAME}: {type(module).__name__} rotates queries and keys before attention. That is computed as it comes, but "
            "stick-breaking attention knows the order by itself and is meant for models without rotation."
        )


def one_step(query, key, value, documents, scaling, attend_current):
    """The output [B, H, d] of one query for each row, by the kernel that reads each key once."""
    batch, heads, _, _ = query.shape
    keys, gate = key.shape[2], None
    lengths = torch.full((batch,), keys, dtype=torch.int32, device=query.device)
    if documents is not None:
        lengths = (documents != UNWRITTEN).sum(1, dtype=torch.int32)
        gate = (documents >= 0).float()[:, :, None].expand(batch, keys, heads)
    return stickbreaking_decode(
        query[:, :, 0], key.contiguous(), value.contiguous(), lengths, scale=scaling, attend_current=attend_current,
        gate_cache=gate, heads_first=True
    )


def stickbreaking_forward(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **options):
    """(o [B, T, H, d], None) of query [B, H, T, d] and key, value [B, G, keys, d]."""
    check_options(module, dropout, options)
    attend_current = bool(getattr(module.config, "attend_current", False))
    require(
        attention_mask is None or attention_mask.dim() == 2,
        f"{NAME}: masks of four dimensions are not possible; give a mask [batch, tokens] or position_ids",
    )
    grad = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    if query.shape[2] == 1 and key.shape[2] > 1 and not grad:
        o = one_step(query, key, value, attention_mask, scaling, attend_current)
        return o[:, None], None
    start = None
    if attention_mask is not None and query.shape[2] < key.shape[2]:
        start = (attention_mask[0] != UNWRITTEN).sum() - query.shape[2]
    o, _ = stickbreaking_attention(
        query, key, value, scale=scaling, attend_current=attend_current, documents=attention_mask, query_start=start,
        heads_first=True
    )
    return o.transpose(1, 2), None


def register(name=NAME):
    """Makes the kernels known to transformers under this name."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(name, stickbreaking_forward)
    AttentionMaskInterface.register(name, stickbreaking_mask)
