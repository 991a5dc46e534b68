"""The configuration of a model that sbtrain has trained.

`sbtrain` holds the model section of the run's configuration as it stands in config.yaml, and tokenizer_hash, the
SHA-256 of the tokenizer's file. The other values repeat parts of it under the names that other programs look for.
"""
try:
    from transformers import PretrainedConfig
except ImportError:  # modeling_sbtrain.py also works with PyTorch alone

    class PretrainedConfig:
        def __init__(self, **kwargs):
            for key, value in kwargs.items():
                setattr(self, key, value)


class SbtrainConfig(PretrainedConfig):
    model_type = "sbtrain"
    keys_to_ignore_at_inference = ["past_key_values"]

    def __init__(self, sbtrain=None, **kwargs):
        model = dict(sbtrain or {})
        self.sbtrain = model
        self.vocab_size = model.get("vocab", 4096)
        self.hidden_size = model.get("width", 128)
        self.intermediate_size = model.get("inner", 344)
        self.num_hidden_layers = model.get("layers", 4)
        self.num_attention_heads = model.get("heads", 4)
        self.num_key_value_heads = model.get("kv_heads", 0) or self.num_attention_heads
        for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"):
            kwargs.pop(key, None)
        kwargs.pop("num_attention_heads", None)
        kwargs.pop("num_key_value_heads", None)
        self.max_position_embeddings = kwargs.pop("max_position_embeddings", 2048)
        kwargs["tie_word_embeddings"] = model.get("tied", True)
        super().__init__(**kwargs)
