#!/usr/bin/env python3
"""sbtrain.torch on the CPU: the ops against formulas that are written down once more, their gradients against finite
differences in float64, and what torch wants of an op (opcheck, torch.compile as one graph, autocast, checkpoints).

    SBTRAIN_PYTHON=... tests/interop/with_python.sh tests/torch/attention_test.py

Exit status: 0 good, 1 not good, 77 PyTorch is not installed.
"""
import contextlib
import math
import pathlib
import subprocess
import sys
import unittest
from unittest import mock

from torch_2_4 import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from sbtrain import kernels
from sbtrain.torch import (
    Fire,
    _cuda,
    _ops,
    softmax_attention,
    softmax_decode,
    stickbreaking_attention,
    stickbreaking_decode,
)

ROOT = pathlib.Path(__file__).resolve().parents[2]
BOUNDS = [0, 3, 3, 4, 11]  # lengths 3, 0, 1 and 7
T, H, G, D = BOUNDS[-1], 4, 2, 8


def random(*shape, dtype=torch.float64, grad=True, seed=0):
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, dtype=dtype, generator=generator).requires_grad_(grad)


def qkv(tokens=T, heads=H, groups=G, **options):
    return [random(tokens, n, D, seed=i, **options) for i, n in enumerate((heads, groups, groups))]


def gates(tokens=T):
    return torch.sigmoid(random(tokens, H, grad=False, seed=9)).requires_grad_()


def fire():
    """m is so small that some queries stand beyond the threshold, and some do not."""
    c, m = (torch.tensor([x], dtype=torch.float64, requires_grad=True) for x in (0.1, -0.006))
    return Fire(c, m, random(32), random(32, seed=1), random(H, 32), random(H))


def cu_seqlens(dtype=torch.int32):
    return torch.tensor(BOUNDS, dtype=dtype)


def stick_formula(q, k, v, scale=None, attend_current=False, gate=None, remainder=None):
    """(o, rem) of one document, key by key as the paper walks: q [L, H, d]."""
    length, heads, d = q.shape
    group = heads // k.shape[1]
    scale = d**-0.5 if scale is None else scale
    o, rem = torch.zeros_like(q), torch.ones(length, heads, dtype=q.dtype)
    for j in range(length):
        for h in range(heads):
            stick = torch.ones((), dtype=q.dtype)
            for i in range(j if attend_current else j - 1, -1, -1):
                beta = torch.sigmoid(scale * (q[j, h] @ k[i, h // group]))
                beta = beta if gate is None else gate[i, h] * beta
                o[j, h] += beta * stick * v[i, h // group]
                stick = stick * (1 - beta)
            rem[j, h] = stick
            if isinstance(remainder, torch.Tensor):
                o[j, h] += stick * remainder[h]
            elif remainder == "value":
                o[j, h] += stick * v[j, h // group]
    return o, rem


def softmax_formula(q, k, v, slopes=None, window=None, bias=None):
    length, heads, d = q.shape
    group = heads // k.shape[1]
    o = torch.zeros_like(q)
    for j in range(length):
        first = max(0, j + 1 - window) if window else 0
        for h in range(heads):
            z = torch.stack([q[j, h] @ k[i, h // group] for i in range(first, j + 1)]) / math.sqrt(d)
            distance = j - torch.arange(first, j + 1, dtype=q.dtype)
            if slopes is not None:
                z = z - slopes[h] * distance
            if bias is not None:
                z = z + bias(j, distance)[h]
            o[j, h] = torch.softmax(z, 0) @ v[first : j + 1, h // group]
    return o


def fire_formula(f):
    def bias(j, distance):
        def psi(x):
            return torch.log(f.c.abs() * x + 1)

        threshold = torch.maximum(torch.tensor([float(j)], dtype=f.c.dtype), (f.m * 512).abs())
        u = psi(distance) / (psi(threshold) + 1e-6)
        return (torch.relu(u[:, None] * f.w1 + f.b1) @ f.w2.T + f.b2).T

    return bias


def documents(*tensors):
    for begin, end in zip(BOUNDS, BOUNDS[1:]):
        yield [x[begin:end] for x in tensors]


STICKS = {
    "plain": {},
    "current": {"attend_current": True, "scale": 0.7},
    "gate": {"gate": gates()},
    "value": {"remainder": "value", "gate": gates()},
    "vector": {"remainder": random(H, D), "attend_current": True},
}


class StickBreaking(unittest.TestCase):
    def close(self, a, b, tolerance=1e-10):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)

    def test_ragged_packs_follow_the_formula(self):
        for name, options in STICKS.items():
            q, k, v = qkv()
            o, rem = stickbreaking_attention(q, k, v, cu_seqlens=cu_seqlens(torch.int64), max_seqlen=7, **options)
            expected = []
            for begin, end in zip(BOUNDS, BOUNDS[1:]):
                one = {**options, "gate": options["gate"][begin:end]} if "gate" in options else options
                expected.append(stick_formula(q[begin:end], k[begin:end], v[begin:end], **one))
            with self.subTest(name):
                self.close(o, torch.cat([x for x, _ in expected]))
                self.close(rem, torch.cat([x for _, x in expected]))

    def test_gradients_of_both_outputs_are_those_of_finite_differences(self):
        for name, options in STICKS.items():
            learned = {key: x for key, x in options.items() if isinstance(x, torch.Tensor)}
            fixed = {key: x for key, x in options.items() if key not in learned}

            def run(q, k, v, *tensors):
                chosen = dict(zip(learned, tensors))
                return stickbreaking_attention(q, k, v, cu_seqlens=cu_seqlens(), **fixed, **chosen)

            with self.subTest(name):
                self.assertTrue(torch.autograd.gradcheck(run, (*qkv(), *learned.values()), fast_mode=True))

    def test_a_gradient_of_one_output_alone(self):
        for use in (0, 1):
            tensors = qkv()
            stickbreaking_attention(*tensors)[use].sum().backward()
            expected = qkv()
            stick_formula(*expected)[use].sum().backward()
            for x, y in zip(tensors, expected):
                self.close(x.grad, torch.zeros_like(x) if y.grad is None else y.grad)

    def test_layouts_and_strides(self):
        q, k, v = (x.detach().reshape(1, T, -1, D).repeat(3, 1, 1, 1) for x in qkv())
        o, rem = stickbreaking_attention(q, k, v)
        self.assertEqual((o.shape, rem.shape), ((3, T, H, D), (3, T, H)))
        self.close(o[0], stick_formula(q[0], k[0], v[0])[0])
        first = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
        o_first, rem_first = stickbreaking_attention(*first, heads_first=True)
        self.close(o_first, o.transpose(1, 2))
        self.close(rem_first, rem.transpose(1, 2))
        wide = torch.zeros(3, T, H, 3 * D, dtype=torch.float64)
        wide[..., D : 2 * D] = q
        self.close(stickbreaking_attention(wide[..., D : 2 * D], k, v)[0], o)

    def test_fewer_queries_than_keys_and_caches_that_are_longer(self):
        q, k, v = (x.detach()[None] for x in qkv())
        o, rem = stickbreaking_attention(q, k, v)
        last_o, last_rem = stickbreaking_attention(q[:, -3:], k, v)
        self.close(last_o, o[:, -3:])
        self.close(last_rem, rem[:, -3:])
        for start in (4, torch.tensor(4)):
            k_long, v_long = (torch.cat([x[:, :7], torch.full_like(x, 1e3)], 1) for x in (k, v))
            middle, _ = stickbreaking_attention(q[:, 4:7], k_long, v_long, query_start=start)
            self.close(middle, o[:, 4:7])

    def test_padding_anywhere(self):
        q, k, v = (x.detach().reshape(1, T, -1, D).repeat(3, 1, 1, 1).requires_grad_() for x in qkv())
        mask = torch.ones(3, T, dtype=torch.long)
        mask[0, :4], mask[1, 7:], mask[2, 3:6] = 0, 0, 0  # left, right, in the middle
        for keep in (mask, mask.bool()):
            o, rem = stickbreaking_attention(q, k, v, attention_mask=keep)
            for row in range(3):
                here = mask[row].bool()
                expected_o, expected_rem = stick_formula(q[row, here], k[row, here], v[row, here])
                self.close(o[row, here], expected_o)
                self.close(rem[row, here], expected_rem)
                self.assertEqual(float(o[row, ~here].detach().abs().sum()), 0)
                self.assertTrue(bool((rem[row, ~here] == 1).all()))
        o.square().sum().backward()
        self.assertEqual(float(k.grad[~mask.bool()].abs().sum()), 0)
        self.assertGreater(float(k.grad[mask.bool()].abs().sum()), 0)

    def test_documents_by_their_numbers(self):
        q, k, v = (x.detach()[None] for x in qkv())
        numbers = torch.tensor([[5, 5, 5, -1, 2, 2, 5, 2, -1, 0, 2]])
        o, _ = stickbreaking_attention(q, k, v, documents=numbers)
        for document in (5, 2, 0):
            here = numbers[0] == document
            self.close(o[0, here], stick_formula(q[0, here], k[0, here], v[0, here])[0])

    def test_types(self):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            q, k, v = qkv(dtype=dtype)
            o, rem = stickbreaking_attention(q, k, v)
            self.assertEqual((o.dtype, rem.dtype), (dtype, torch.float32))
            expected = stick_formula(*(x.detach().double() for x in (q, k, v)))
            self.close(o.double(), expected[0], 1e-5 if dtype == torch.float32 else 2e-2)
            self.close(rem.double(), expected[1], 1e-5)
        with torch.autocast("cpu", torch.bfloat16):
            q, k, v = qkv(dtype=torch.float32)
            o, _ = stickbreaking_attention(q, k, v)
            self.assertEqual(o.dtype, torch.bfloat16)
        o.float().sum().backward()
        self.assertEqual(q.grad.dtype, torch.float32)

    def test_large_logits_give_no_nan(self):
        q, k, v = qkv()
        o, rem = stickbreaking_attention(1e4 * q, k, v)
        (o.sum() + rem.sum()).backward()
        for x in (o, rem, q.grad, k.grad, v.grad):
            self.assertTrue(bool(x.isfinite().all()))

    def test_wrong_inputs_are_refused_by_name(self):
        q, k, v = qkv()
        batch = [x[None] for x in (q, k, v)]
        wrong = {
            "q: expected": lambda: stickbreaking_attention(q[0], k, v),
            "k and v of one shape": lambda: stickbreaking_attention(q, k, v[1:]),
            "one type": lambda: stickbreaking_attention(q.float(), k, v),
            "heads": lambda: stickbreaking_attention(q[:, :3], k, v),
            "cu_seqlens": lambda: stickbreaking_attention(q, k, v, cu_seqlens=torch.tensor([0.0, 11.0])),
            "batch": lambda: stickbreaking_attention(*(x.expand(2, -1, -1, -1) for x in batch), cu_seqlens=cu_seqlens()),
            "rise": lambda: stickbreaking_attention(q, k, v, cu_seqlens=torch.tensor([0, 5, 4, 11])),
            "max_seqlen": lambda: stickbreaking_attention(q, k, v, cu_seqlens=cu_seqlens(), max_seqlen=6),
            "gate": lambda: stickbreaking_attention(q, k, v, gate=torch.ones(T, G)),
            "remainder": lambda: stickbreaking_attention(q, k, v, remainder="bias"),
            "remainder: expected [4, 8]": lambda: stickbreaking_attention(q, k, v, remainder=torch.ones(D)),
            "attention_mask": lambda: stickbreaking_attention(*batch, attention_mask=torch.ones(1, 3)),
            "documents": lambda: stickbreaking_attention(q, k, v, documents=torch.ones(1, T)),
            "queries without keys": lambda: stickbreaking_attention(batch[0], batch[1][:, 1:], batch[2][:, 1:]),
            "bias": lambda: softmax_attention(q, k, v, bias="rope"),
            "window": lambda: softmax_attention(q, k, v, window=0),
            "not on meta": lambda: stickbreaking_attention(*(x.to("meta") for x in (q, k, v))),
        }
        for text, call in wrong.items():
            with self.subTest(text), self.assertRaises(ValueError) as refused:
                call()
            self.assertIn(text, str(refused.exception))


class Softmax(unittest.TestCase):
    close = StickBreaking.close

    def test_biases_and_windows_follow_the_formula(self):
        slopes = [2 ** (-8 * (h + 1) / H) for h in range(H)]
        f = fire()
        cases = {
            "none": ({}, {}),
            "window": ({"window": 3}, {"window": 3}),
            "alibi": ({"bias": "alibi", "window": 5}, {"slopes": slopes, "window": 5}),
            "fire": ({"bias": f}, {"bias": fire_formula(f)}),
        }
        for name, (options, theirs) in cases.items():
            tensors = qkv()
            o = softmax_attention(*tensors, cu_seqlens=cu_seqlens(), max_seqlen=7, **options)
            with self.subTest(name):
                self.close(o, torch.cat([softmax_formula(*x, **theirs) for x in documents(*tensors)]))

    def test_gradients_are_those_of_finite_differences(self):
        for options in ({"window": 3}, {"bias": "alibi"}):
            self.assertTrue(
                torch.autograd.gradcheck(lambda *x: softmax_attention(*x, cu_seqlens=cu_seqlens(), **options), tuple(qkv()), fast_mode=True)
            )
        self.assertTrue(
            torch.autograd.gradcheck(
                lambda q, k, v, *f: softmax_attention(q, k, v, cu_seqlens=cu_seqlens(), bias=Fire(*f)), (*qkv(), *fire()), fast_mode=True
            )
        )


class Decoding(unittest.TestCase):
    close = StickBreaking.close

    def test_a_step_is_the_last_row_of_the_pass(self):
        q, k, v = (x.detach() for x in qkv())
        lengths = torch.tensor([T, 5], dtype=torch.int32)
        caches = [torch.stack([x, x]) for x in (k, v)]
        queries = torch.stack([q[-1], q[4]])
        full = {
            "stick": lambda n: stickbreaking_attention(q[:n], k[:n], v[:n], attend_current=True)[0][-1],
            "softmax": lambda n: softmax_attention(q[:n], k[:n], v[:n], window=4)[-1],
        }
        steps = {
            "stick": lambda *x, **y: stickbreaking_decode(*x, attend_current=True, **y),
            "softmax": lambda *x, **y: softmax_decode(*x, window=4, **y),
        }
        for name, step in steps.items():
            expected = torch.stack([full[name](T), full[name](5)])
            self.close(step(queries, *caches, lengths), expected)
            first = [x.transpose(1, 2).contiguous() for x in caches]
            self.close(step(queries, *first, lengths, heads_first=True), expected)

    def test_a_gate_of_zero_hides_a_key(self):
        q, k, v = (x.detach() for x in qkv())
        here = torch.ones(T, dtype=torch.bool)
        here[2:5] = False
        expected = stickbreaking_attention(q[here], k[here], v[here])[0][-1]
        gate = here.float()[None, :, None].expand(1, T, H)
        lengths = torch.tensor([T], dtype=torch.int32)
        self.close(stickbreaking_decode(q[-1:], k[None], v[None], lengths, gate_cache=gate)[0], expected)
        first = [x[None].transpose(1, 2).contiguous() for x in (k, v)]
        self.close(stickbreaking_decode(q[-1:], *first, lengths, gate_cache=gate, heads_first=True)[0], expected)


class Memory(unittest.TestCase):
    """What the kernels are given of tensors that lie in other ways."""

    def given(self, x):
        """What a call keeps of x, and the pointer and the stride in its struct, which is planned for dense tensors."""
        rows = kernels.Rows(stride=x.shape[-2] * x.shape[-1])
        return _cuda.give(rows, x), rows.data, rows.stride

    def test_rows_are_read_where_they_lie_or_copied(self):
        matrix = torch.zeros(5, 3, 4, 16)
        columns = matrix[:, 1]
        one = torch.zeros(1, 4, 16).as_strided((1, 4, 16), (3, 16, 1))  # the stride of one row says nothing
        head = torch.zeros(5, 1, 16).as_strided((5, 1, 16), (16, 7, 1))
        for x, stride in ((matrix[:, 0], 192), (columns, 192), (one, 64), (head, 16), (matrix[0], 64)):
            kept, *rows = self.given(x)
            self.assertIs(kept, x)
            self.assertEqual(rows, [x.data_ptr(), stride])
        rows = matrix.view(1, 5, 12, 16)[:, :, 4:8]  # a batch of one
        self.assertEqual(self.given(rows)[1:], (rows.data_ptr(), 192))
        shifted = torch.zeros(5 * 64 + 1)[1:].view(5, 4, 16)
        for x in (shifted, columns.transpose(0, 1), columns[..., ::2], columns.expand(5, 4, 16)[:, :1].expand(5, 4, 16)):
            copy, address, stride = self.given(x)
            self.assertTrue(_cuda.fits(copy))
            self.assertTrue(torch.equal(copy, x))
            self.assertEqual((address, stride), (copy.data_ptr(), copy.shape[1] * copy.shape[2]))

    def test_structs_are_those_of_their_call(self):
        """What is kept from call to call is never another call's."""
        seen = []
        with contextlib.ExitStack() as patches:
            for owner, name, function in (
                (kernels, "call", lambda name, x: seen.append((name, type(x).from_buffer_copy(x)))),
                (kernels, "workspace", lambda kind, x, backward: 512 if backward else 256 + bool(x.gate)),
                (_cuda, "current_stream", lambda device: 7),
            ):
                patches.enter_context(mock.patch.object(owner, name, function))
            _cuda.plan.cache_clear()
            patches.callback(_cuda.plan.cache_clear)
            for batch, tokens, gated, epsilon in ((2, 8, False, 0.0), (2, 8, True, 0.0), (4, 4, False, 0.5), (2, 8, False, 0.0)):
                q, k, v = (torch.zeros(batch, tokens, n, 16, dtype=torch.bfloat16) for n in (4, 2, 2))
                gate = torch.ones(batch, tokens, 4) if gated else None
                options = (tokens, 0.25, True, 1, epsilon)
                o, rem, log2_rem, stop = _cuda.stickbreaking_forward(q, k, v, None, gate, None, *options)
                dq, _, dv, *others = _cuda.stickbreaking_backward(
                    o, None, q, k, v, None, gate, None, log2_rem, stop, *options
                )
                self.assertEqual((rem.shape, len(others)), (q.shape[:-1], int(gated)))
                (_, x), (name, y) = seen[-2:]
                self.assertEqual(name, "sbtrain_stickbreaking_backward")
                for call in (x, y):
                    self.assertEqual([call.q.data, call.k.data, call.v.data], [t.data_ptr() for t in (q, k, v)])
                    self.assertEqual((call.q.stride, call.k.stride, call.stream, call.version), (64, 32, 7, kernels.VERSION))
                    self.assertEqual((call.tokens, call.sequences, call.max_seqlen), (batch * tokens, batch, tokens))
                    self.assertEqual((call.heads, call.kv_heads, call.skip_epsilon), (4, 2, epsilon))
                    self.assertEqual((call.gate, call.gate_stride), (gate.data_ptr(), 4) if gated else (None, 0))
                    self.assertIsNone(call.cu_seqlens)
                self.assertEqual((x.workspace_bytes, y.workspace_bytes), (256 + gated, 512))
                self.assertEqual((x.o.data, x.dq.data), (o.data_ptr(), None))
                self.assertEqual((y.dq.data, y.dv.data), (dq.data_ptr(), dv.data_ptr()))

    def test_what_it_costs_not_to_know_the_longest_document_is_said_where_it_costs(self):
        x = kernels.StickBreaking(tokens=1000, sequences=7, cu_seqlens=256)
        for per_token, max_seqlen, many in ((0, 0, False), (1, 1000, False), (1, 0, True)):
            with mock.patch.object(
                kernels, "workspace", lambda kind, y, backward: (256 << 20) + (y.max_seqlen << 20) * per_token
            ), mock.patch.object(_cuda, "warn_once") as warn:
                _cuda.say_cost(x, max_seqlen, (256 << 20) + (1000 << 20) * per_token)
            self.assertEqual(warn.called, many)
        self.assertIn("takes 1256 MiB of workspace, as if the 1000 tokens", warn.call_args[0][0])
        self.assertIn("down to 399 MiB", warn.call_args[0][0])


class Torch(unittest.TestCase):
    def test_opcheck(self):
        opcheck = getattr(torch.library, "opcheck", None)
        if opcheck is None:
            self.skipTest("this torch has no opcheck")
        q, k, v = qkv()
        cu = cu_seqlens()
        stick = (0, 0.3, False, 2, 0.0)
        opcheck(_ops.stickbreaking_forward, (q, k, v, cu, gates(), random(H, D), *stick))
        opcheck(_ops.stickbreaking_forward, (q, k, v, None, None, None, T, 0.3, True, 0, 0.0))
        plain = [x.detach() for x in (q, k, v)]
        left, stop = torch.zeros(H, T, dtype=torch.float64), torch.zeros(H, T, dtype=torch.int32)
        rem = random(T, H, grad=False)
        opcheck(_ops.stickbreaking_backward, (plain[0], rem, *plain, cu, None, None, left, stop, 0, 0.3, False, 0, 0.0))
        opcheck(_ops.softmax_forward, (q, k, v, cu, list(fire()), 2, 0, 0.3, 5))
        parameters = [x.detach() for x in fire()]
        opcheck(_ops.softmax_backward, (plain[0], *plain, plain[0], left, cu, parameters, 2, 0, 0.3, 5))
        caches = [x[None] for x in plain[1:]]
        lengths = torch.tensor([T], dtype=torch.int32)
        opcheck(_ops.stickbreaking_decode, (plain[0][-1:], *caches, lengths, None, None, 0.3, False, 0, 0.0))
        opcheck(_ops.softmax_decode, (plain[0][-1:], *caches, lengths, [], 1, 0.3, 0))

    def test_compiled_as_one_graph(self):
        mask = torch.ones(2, T, dtype=torch.bool)
        mask[0, :4] = False

        def padded(q, k, v):
            o, rem = stickbreaking_attention(q, k, v, attention_mask=mask, remainder="value")
            return o.square().sum() + rem.sum()

        def packed(q, k, v):
            o, rem = stickbreaking_attention(q[0], k[0], v[0], cu_seqlens=cu_seqlens())
            return o.square().sum() + rem.sum() + softmax_attention(q, k, v, bias="alibi").sum()

        for function in (padded, packed):
            results = []
            for run in (function, torch.compile(function, fullgraph=True, backend="aot_eager")):
                tensors = [x.detach().repeat(2, 1, 1, 1).requires_grad_() for x in qkv()]
                run(*tensors).backward()
                results.append([x.grad for x in tensors])
            for a, b in zip(*results):
                torch.testing.assert_close(a, b)

    def test_compiled_with_shapes_that_change(self):
        run = torch.compile(lambda *x: stickbreaking_attention(*x)[0], fullgraph=True, dynamic=True, backend="aot_eager")
        for tokens in (5, 9, 12):
            tensors = [x[None] for x in qkv(tokens)]
            torch.testing.assert_close(run(*tensors), stickbreaking_attention(*tensors)[0])

    def test_checkpointed(self):
        results = []
        for kept in (False, True):
            tensors = qkv()
            run = lambda *x: stickbreaking_attention(*x, cu_seqlens=cu_seqlens())[0]  # noqa: E731
            (checkpoint(run, *tensors, use_reentrant=False) if kept else run(*tensors)).square().sum().backward()
            results.append([x.grad for x in tensors])
        for a, b in zip(*results):
            torch.testing.assert_close(a, b, rtol=0, atol=0)

    def test_traced_around_a_break(self):
        def broken(q, k, v):
            o, _ = stickbreaking_attention(q, k, v)
            torch._dynamo.graph_break()
            return stickbreaking_attention(o, k, v)[0]

        tensors = [x[None] for x in qkv()]
        compiled = torch.compile(broken, backend="aot_eager")
        torch.testing.assert_close(compiled(*tensors), broken(*tensors))

    def test_modes_see_the_ops(self):
        seen = []

        class Dispatches(TorchDispatchMode):
            def __torch_dispatch__(self, function, types, arguments=(), options=None):
                seen.append(str(function))
                return function(*arguments, **(options or {}))

        class Functions(TorchFunctionMode):
            def __torch_function__(self, function, types, arguments=(), options=None):
                seen.append(str(function))
                return function(*arguments, **(options or {}))

        for mode, passes in ((Dispatches, ("forward", "backward")), (Functions, ("forward",))):
            for name, function in (("stickbreaking", stickbreaking_attention), ("softmax", softmax_attention)):
                seen.clear()
                with mode():
                    result = function(*qkv())
                    (result[0] if isinstance(result, tuple) else result).sum().backward()
                for each in passes:
                    self.assertIn(f"sbtrain.{name}_{each}.default", seen)

    def test_transformed_by_vmap(self):
        rows = [torch.stack([random(T, n, D, grad=False, seed=i + j) for j in range(2)]) for i, n in enumerate((H, G, G))]
        for a, b in zip(torch.vmap(stickbreaking_attention)(*rows), stickbreaking_attention(*rows)):
            torch.testing.assert_close(a, b)

    def test_gradients_of_gradients_and_of_decoding_are_refused(self):
        q, k, v = qkv()
        for o in (stickbreaking_attention(q, k, v)[0], softmax_attention(q, k, v)):
            (dq,) = torch.autograd.grad(o.sum(), q, create_graph=True)
            with self.assertRaisesRegex(RuntimeError, "gradients of gradients"):
                dq.sum().backward()
        o = stickbreaking_decode(q[-1:], k[None], v[None], torch.tensor([T], dtype=torch.int32))
        with self.assertRaisesRegex(RuntimeError, "has no gradients"):
            o.sum().backward()

    def test_import_loads_no_library(self):
        code = (
            "import sys, sbtrain.torch, sbtrain.kernels\n"
            "sys.exit(sbtrain.kernels.library.cache_info().currsize + any('libsbtrain' in x for x in open('/proc/self/maps')))"
        )
        environment = {"PYTHONPATH": str(ROOT / "python/sbtrain-kernels"), "SBTRAIN_ATTENTION_LIBRARY": "/nowhere.so"}
        self.assertEqual(subprocess.run([sys.executable, "-c", code], env=environment).returncode, 0)


if __name__ == "__main__":
    unittest.main()
