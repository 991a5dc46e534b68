#!/usr/bin/env python3
"""sbtrain.torch in the models of other libraries, on the CPU: a model of transformers under the registered name against
its own tokens one document at a time, padded, packed, with caches and in generate(); the replaced function of
flash-linear-attention against that library's formulas.

Exit status: 0 good, 1 not good, 77 PyTorch or transformers is missing. Without flash-linear-attention its part is
skipped.
"""
import inspect
import sys
import unittest
import warnings
from unittest import mock

from torch_2_4 import torch

try:
    import transformers
    from transformers import LlamaConfig, LlamaForCausalLM, SmolLM3Config, SmolLM3ForCausalLM
except ImportError as error:
    print(f"skipped: {error} (install torch and transformers 5)")
    sys.exit(77)
try:
    import fla.ops.stickbreaking_attn as fla_stick
except (ImportError, RuntimeError):
    fla_stick = None

import sbtrain.torch.fla  # noqa: E402
import sbtrain.torch.transformers  # noqa: E402
from sbtrain.torch import stickbreaking_attention  # noqa: E402

VOCAB, LAYERS, PAD = 50, 2, 7
SHAPE = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 44, "num_hidden_layers": LAYERS, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": PAD, "bos_token_id": 1, "eos_token_id": None,
    "initializer_range": 0.3,
}
NAME = sbtrain.torch.transformers.NAME


def model(**options):
    torch.manual_seed(3)
    config = SmolLM3Config(**SHAPE, no_rope_layers=[0] * LAYERS, attn_implementation=NAME, **options)
    return SmolLM3ForCausalLM(config).eval()


def texts(*lengths):
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(8, VOCAB, (n,), generator=generator) for n in lengths]


def padded(documents, left):
    longest = max(len(d) for d in documents)
    ids, mask = torch.full((len(documents), longest), PAD), torch.zeros(len(documents), longest, dtype=torch.long)
    for row, tokens in enumerate(documents):
        where = slice(longest - len(tokens), longest) if left else slice(0, len(tokens))
        ids[row, where], mask[row, where] = tokens, 1
    return ids, mask


class Transformers(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        sbtrain.torch.transformers.register()
        cls.model = model()
        cls.documents = texts(9, 17, 12)
        with torch.no_grad():
            cls.expected = [cls.model(d[None]).logits[0] for d in cls.documents]

    def close(self, a, b):
        torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-4)

    def test_the_layers_break_sticks(self):
        """The logits change if the function does."""
        calls = []

        def counted(*arguments, **options):
            calls.append(options["scaling"])
            return sbtrain.torch.transformers.stickbreaking_forward(*arguments, **options)

        transformers.AttentionInterface.register(NAME, counted)
        try:
            attention = self.model.model.layers[0].self_attn
            x = torch.randn(1, 6, 32, generator=torch.Generator().manual_seed(1))
            o, _ = attention(x, position_embeddings=None, attention_mask=None)
            self.model(self.documents[0][None])
        finally:
            transformers.AttentionInterface.register(NAME, sbtrain.torch.transformers.stickbreaking_forward)
        q, k, v = (getattr(attention, f"{n}_proj")(x).unflatten(-1, (-1, 8)) for n in "qkv")
        self.close(o, attention.o_proj(stickbreaking_attention(q, k, v)[0].flatten(2)))
        self.assertEqual(len(calls), 1 + LAYERS)

    def test_padding_on_either_side(self):
        for left in (True, False):
            ids, mask = padded(self.documents, left)
            logits = self.model(ids, attention_mask=mask).logits
            for row, expected in enumerate(self.expected):
                self.close(logits[row, mask[row] == 1], expected)

    def test_packed_rows(self):
        positions = torch.cat([torch.arange(len(d)) for d in self.documents])[None]
        logits = self.model(torch.cat(self.documents)[None], position_ids=positions, use_cache=False).logits[0]
        self.close(logits, torch.cat(self.expected))

    def test_caches(self):
        ids, mask = padded(self.documents, True)
        for kind in ("dynamic", "static"):
            cache = transformers.DynamicCache(config=self.model.config)
            if kind == "static":
                cache = transformers.StaticCache(config=self.model.config, max_cache_len=24)
            outputs = []
            for begin, end in ((0, 12), (12, 14), (14, 15), (15, 16), (16, 17)):  # a prompt, a chunk, single tokens
                with torch.no_grad():
                    step = self.model(ids[:, begin:end], attention_mask=mask[:, :end], past_key_values=cache)
                outputs.append(step.logits)
            logits = torch.cat(outputs, 1)
            with self.subTest(kind):
                for row, expected in enumerate(self.expected):
                    self.close(logits[row, mask[row] == 1], expected)

    def test_one_query_does_not_see_padding_beside_it(self):
        """In whole models the sticks are used up before they reach padding on the left."""
        attention = self.model.model.layers[0].self_attn
        query, key, value = (torch.randn(2, n, 9, 8, generator=torch.Generator().manual_seed(n)) for n in (4, 2, 2))
        mask = torch.ones(2, 9, dtype=torch.bool)
        mask[0, 4:7] = mask[1, 7] = False
        documents = sbtrain.torch.transformers.stickbreaking_mask(2, 1, 9, q_offset=8, attention_mask=mask)
        with torch.no_grad():
            o, _ = sbtrain.torch.transformers.stickbreaking_forward(attention, query[:, :, -1:], key, value, documents)
        expected, _ = stickbreaking_attention(query, key, value, attention_mask=mask, heads_first=True)
        self.close(o[:, 0], expected[:, :, -1])

    def test_generate(self):
        ids, mask = padded(self.documents, True)
        options = {"max_new_tokens": 6, "do_sample": False}
        together = self.model.generate(ids, attention_mask=mask, **options)[:, -6:]
        static = self.model.generate(ids, attention_mask=mask, cache_implementation="static", **options)[:, -6:]
        self.assertTrue(torch.equal(together, static))
        for row, tokens in enumerate(self.documents):
            sequence = tokens[None]
            for _ in range(6):
                sequence = torch.cat([sequence, self.model(sequence).logits[:, -1:].argmax(-1)], 1)
            self.assertTrue(torch.equal(sequence[0, -6:], together[row]))

    def test_gradients_and_checkpointing(self):
        ids, mask = padded(self.documents, False)
        losses = []
        for checkpointing in (False, True):
            module = model().train()
            if checkpointing:
                module.gradient_checkpointing_enable()
            module(ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100), use_cache=False).loss.backward()
            losses.append(torch.cat([p.grad.flatten() for p in module.parameters()]))
        self.assertGreater(float(losses[0].abs().sum()), 0)
        self.close(*losses)

    def test_what_is_not_possible_is_refused_by_name(self):
        with self.assertRaisesRegex(ValueError, "attention_dropout"):
            model(attention_dropout=0.1).train()(self.documents[0][None])
        with self.assertRaisesRegex(ValueError, "four dimensions"):
            self.model(self.documents[0][None], attention_mask=torch.zeros(1, 1, 9, 9))

    def test_a_model_that_rotates_is_warned_about(self):
        module = LlamaForCausalLM(LlamaConfig(**SHAPE, attn_implementation=NAME))
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            module(self.documents[0][None])
            self.model(self.documents[0][None])
        self.assertEqual(sum("rotates" in str(x.message) for x in said), 1)


@unittest.skipIf(fla_stick is None, "flash-linear-attention is not installed")
class Fla(unittest.TestCase):
    def setUp(self):
        sbtrain.torch.fla.patch()
        self.addCleanup(sbtrain.torch.fla.unpatch)

    def test_the_signature_is_that_of_the_library(self):
        sbtrain.torch.fla.unpatch()
        original = inspect.signature(fla_stick.parallel_stickbreaking_attn)
        sbtrain.torch.fla.patch()
        replaced = inspect.signature(fla_stick.parallel_stickbreaking_attn)
        self.assertEqual(list(original.parameters), list(replaced.parameters))
        for name, parameter in original.parameters.items():
            self.assertEqual(parameter.default, replaced.parameters[name].default)

    def test_every_module_has_it_and_gives_it_back(self):
        try:
            import fla.layers.stickbreaking_attn as layers
        except ModuleNotFoundError as error:
            self.skipTest(f"{error} (install flash-linear-attention; fla-core has no layers)")
        modules = [fla_stick, layers, sys.modules["fla.ops.stickbreaking_attn.parallel"]]
        for module in modules:
            self.assertIs(module.parallel_stickbreaking_attn, sbtrain.torch.fla.parallel_stickbreaking_attn)
        sbtrain.torch.fla.unpatch()
        for module in modules:
            self.assertIsNot(module.parallel_stickbreaking_attn, sbtrain.torch.fla.parallel_stickbreaking_attn)

    def test_ops_alone_are_enough(self):
        """As with fla-core, which has neither layers nor models."""
        sbtrain.torch.fla.unpatch()
        absent = {name: None for name in ("fla.layers", "fla.layers.stickbreaking_attn")}
        with mock.patch.dict(sys.modules, absent):
            sbtrain.torch.fla.patch()
            self.assertIs(fla_stick.parallel_stickbreaking_attn, sbtrain.torch.fla.parallel_stickbreaking_attn)
            sbtrain.torch.fla.unpatch()

    def test_results_are_those_of_its_formulas(self):
        torch.manual_seed(1)
        for key_dim, value_dim, current in ((8, 8, False), (12, 20, True), (24, 16, False)):
            shapes = ((2, 13, 4, key_dim), (2, 13, 2, key_dim), (2, 13, 2, value_dim))
            tensors = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
            weights = torch.randn(2, 13, 4, value_dim, dtype=torch.float64), torch.randn(2, 13, 4, dtype=torch.float64)
            results = []
            for function in (fla_stick.parallel_stickbreaking_attn, fla_stick.naive_stickbreaking_attn):
                o, rem = function(*tensors, attend_current=current)
                gradients = torch.autograd.grad((o * weights[0]).sum() + (rem * weights[1]).sum(), tensors)
                results.append([o, rem, *gradients])
            for a, b in zip(*results):
                torch.testing.assert_close(a, b)

    def test_packs(self):
        q, k, v = (torch.randn(1, 13, n, 8) for n in (4, 2, 2))
        bounds = torch.tensor([0, 5, 6, 13])
        o, rem = fla_stick.parallel_stickbreaking_attn(q, k, v, cu_seqlens=bounds)
        for begin, end in zip(bounds[:-1].tolist(), bounds[1:].tolist()):
            expected = fla_stick.naive_stickbreaking_attn(*(x[:, begin:end] for x in (q, k, v)))
            torch.testing.assert_close(o[:, begin:end], expected[0])
            torch.testing.assert_close(rem[:, begin:end], expected[1])
        with self.assertRaisesRegex(ValueError, "Expected q, k and v of shapes"):
            fla_stick.parallel_stickbreaking_attn(q[:, 1:], k, v)


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    unittest.main()
