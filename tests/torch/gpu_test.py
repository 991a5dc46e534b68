#!/usr/bin/env python3
"""sbtrain.torch on a GPU: outputs and gradients against the formulas in float64, and the ways in which torch runs an
op: compiled, recorded into a CUDA graph, on two streams, under autocast, on tensors that lie in other ways.

    SBTRAIN_ATTENTION_LIBRARY=.../libsbtrain_attention.so python3 tests/torch/gpu_test.py

Exit status: 0 good, 1 not good, 77 there is no GPU, or PyTorch or the library is missing.
"""
import sys
import unittest
import warnings

from torch_2_4 import torch

from sbtrain import kernels
from sbtrain.torch import (
    Fire,
    _ops,
    softmax_attention,
    softmax_decode,
    stickbreaking_attention,
    stickbreaking_decode,
)

if not torch.cuda.is_available() or not kernels.library_path().exists():
    print(f"skipped: PyTorch finds no GPU, or {kernels.library_path()} does not exist")
    sys.exit(77)

# Relative, Frobenius: what bf16 inputs and outputs allow (docs/developers/kernels.md).
OUTPUT_ERROR, GRADIENT_ERROR = 4e-3, 8e-3
BOUNDS = [0, 300, 301, 301, 428, 1000]
H, G = 4, 2


def random(*shape, seed=0, dtype=torch.bfloat16, grad=True):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to("cuda", dtype).requires_grad_(grad)


def qkv(d, tokens=BOUNDS[-1], groups=G):
    return [random(tokens, n, d, seed=i) for i, n in enumerate((H, groups, groups))]


def cu_seqlens():
    return torch.tensor(BOUNDS, dtype=torch.int32, device="cuda")


def oracle(function, tensors):
    """Results and inputs of the same call in float64 on the CPU."""
    exact = [x.detach().double().cpu().requires_grad_() for x in tensors]
    return function(*exact), exact


class Errors(unittest.TestCase):
    def close(self, name, actual, expected, bound):
        actual, expected = actual.detach().double().cpu(), expected.detach().double()
        error = float((actual - expected).norm() / expected.norm().clamp(min=1e-30))
        self.assertTrue(error <= bound, f"{name}: relative error {error:.2e}, at most {bound:.0e}")

    def compare(self, name, function, tensors):
        """Outputs, and gradients of a weighted sum of them."""

        def run(*x):
            outputs = function(*x)
            return outputs if isinstance(outputs, tuple) else (outputs,)

        actual = run(*tensors)
        expected, exact = oracle(run, tensors)
        weights = [random(*x.shape, seed=9, dtype=torch.float32, grad=False) for x in actual]
        weights[0] = weights[0].bfloat16()
        torch.autograd.backward(actual, [w.to(x.dtype) for w, x in zip(weights, actual)])
        torch.autograd.backward(expected, [w.cpu().to(x.dtype) for w, x in zip(weights, expected)])
        for i, (a, b) in enumerate(zip(actual, expected)):
            self.close(f"{name}, output {i}", a, b, OUTPUT_ERROR)
        for i, (a, b) in enumerate(zip(tensors, exact)):
            if b.grad is not None and float(b.grad.norm()) > 0:
                self.close(f"{name}, gradient {i}", a.grad, b.grad, GRADIENT_ERROR)


class Accuracy(Errors):
    def test_stickbreaking(self):
        for d in (16, 32, 64, 72, 128, 256):
            for current in (False, True):

                def call(*x):
                    return stickbreaking_attention(
                        *x, cu_seqlens=torch.tensor(BOUNDS, device=x[0].device), max_seqlen=572, attend_current=current
                    )

                self.compare(f"d = {d}, attend_current {current}", call, qkv(d))

    def test_options(self):
        gate = torch.sigmoid(random(1000, H, seed=5, dtype=torch.float32, grad=False)).requires_grad_()
        cases = {
            "gate": (lambda q, k, v, f: stickbreaking_attention(q, k, v, gate=f), [gate]),
            "value": (lambda q, k, v: stickbreaking_attention(q, k, v, remainder="value", scale=0.05), []),
            "vector": (lambda q, k, v, r: stickbreaking_attention(q, k, v, remainder=r, scale=0.05), [random(H, 64, seed=6)]),
        }
        for name, (call, more) in cases.items():
            self.compare(name, call, [*qkv(64), *more])

    def test_padding_and_fewer_queries(self):
        def padded(q, k, v):
            mask = torch.ones(2, 500, dtype=torch.bool, device=q.device)
            mask[0, :77], mask[1, 100:140] = False, False
            return stickbreaking_attention(*(x.unflatten(0, (2, 500)) for x in (q, k, v)), attention_mask=mask)

        def chunk(q, k, v):
            # Where nothing is skipped: what is left of a stick is far below skip_epsilon.
            return stickbreaking_attention(q[None, -200:], k[None], v[None], skip_epsilon=0.0)

        self.compare("padded", padded, qkv(64))
        self.compare("chunk", chunk, qkv(64))

    def test_softmax(self):
        for d in (32, 64, 128):
            for options in ({}, {"window": 100}, {"bias": "alibi"}):

                def call(*x):
                    return softmax_attention(*x, cu_seqlens=torch.tensor(BOUNDS, device=x[0].device), max_seqlen=572, **options)

                self.compare(f"softmax d = {d}, {options}", call, qkv(d))

    def test_fire(self):
        one = [torch.tensor([x], device="cuda", dtype=torch.bfloat16).requires_grad_() for x in (0.1, 1.0)]
        network = [random(32, seed=1), random(32, seed=2), random(H, 32, seed=3), random(H, seed=4)]

        def call(q, k, v, *f):
            return softmax_attention(q, k, v, bias=Fire(*f))

        self.compare("fire", call, [*qkv(64), *one, *network])

    def test_decoding(self):
        lengths = torch.tensor([1, 700, 1000], dtype=torch.int32, device="cuda")
        q = random(3, H, 64, grad=False)
        caches = [random(3, 1000, G, 64, seed=s, grad=False) for s in (1, 2)]
        steps = {
            "stick": lambda *x, **y: stickbreaking_decode(*x, attend_current=True, **y),
            "softmax": lambda *x, **y: softmax_decode(*x, window=300, **y),
        }
        for name, step in steps.items():
            expected = step(*(x.double().cpu() for x in (q, *caches)), lengths.cpu())
            self.close(name, step(q, *caches, lengths), expected, OUTPUT_ERROR)
            first = [x.transpose(1, 2).contiguous() for x in caches]
            self.close(name + ", heads first", step(q, *first, lengths, heads_first=True), expected, OUTPUT_ERROR)


def gradients(function, tensors):
    for x in tensors:
        x.grad = None
    o = function(*tensors)
    o.backward(torch.ones_like(o))
    return [o.detach(), *(x.grad.clone() for x in tensors)]


def output(q, k, v):
    return stickbreaking_attention(q, k, v, cu_seqlens=cu_seqlens(), max_seqlen=572)[0]


class Torch(Errors):
    def same(self, a, b):
        for x, y in zip(a, b):
            self.assertTrue(torch.equal(x, y))

    def test_the_same_bits_on_every_run(self):
        tensors = qkv(64)
        self.same(gradients(output, tensors), gradients(output, tensors))

    def test_opcheck(self):
        torch.library.opcheck(
            _ops.stickbreaking_forward, (*qkv(64), cu_seqlens(), None, None, 572, 0.125, False, 0, 0.0),
            test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"),
        )

    def test_compiled(self):
        tensors, bounds = qkv(64), cu_seqlens()

        def function(q, k, v):
            return stickbreaking_attention(q, k, v, cu_seqlens=bounds, max_seqlen=572)[0]

        self.same(gradients(torch.compile(function, fullgraph=True), tensors), gradients(function, tensors))

    def test_cuda_graph(self):
        tensors, bounds = [x.detach().requires_grad_() for x in qkv(64)], cu_seqlens()

        def step():
            for x in tensors:
                x.grad = None
            o, _ = stickbreaking_attention(*tensors, cu_seqlens=bounds, max_seqlen=572)
            o.backward(torch.ones_like(o))
            return o

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            recorded = step()
        recorded_gradients = [x.grad for x in tensors]
        with torch.no_grad():
            for x in tensors:
                x.mul_(0.5)
            bounds.copy_(torch.tensor([0, 100, 100, 500, 999, 1000]))
        graph.replay()
        again = [x.detach().clone().requires_grad_() for x in tensors]
        o, _ = stickbreaking_attention(*again, cu_seqlens=bounds, max_seqlen=572)
        o.backward(torch.ones_like(o))
        self.same([recorded, *recorded_gradients], [o, *(x.grad for x in again)])

    def test_two_streams(self):
        inputs = [qkv(64), qkv(128)]
        expected = [gradients(output, x) for x in inputs]
        streams, results = [torch.cuda.Stream() for _ in inputs], [None, None]
        torch.cuda.synchronize()
        for _ in range(3):
            for i, stream in enumerate(streams):
                with torch.cuda.stream(stream):
                    results[i] = gradients(output, inputs[i])
        torch.cuda.synchronize()
        for a, b in zip(results, expected):
            self.same(a, b)

    def test_the_current_device_stays(self):
        if torch.cuda.device_count() < 2:
            self.skipTest("one GPU")
        with torch.cuda.device(0):
            tensors = [x.detach().to("cuda:1").requires_grad_() for x in qkv(64)]
            o, _ = stickbreaking_attention(*tensors)
            o.sum().backward()
            self.assertEqual(torch.cuda.current_device(), 0)
        here = [x.detach().to("cuda:0").requires_grad_() for x in tensors]
        self.assertTrue(torch.equal(stickbreaking_attention(*here)[0].cpu(), o.detach().cpu()))

    def test_types(self):
        tensors = [x.detach().float() for x in qkv(64)]
        with self.assertRaisesRegex(ValueError, "tensor cores in bfloat16"):
            stickbreaking_attention(*tensors)
        with torch.autocast("cuda", torch.bfloat16):
            self.assertEqual(stickbreaking_attention(*tensors)[0].dtype, torch.bfloat16)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for _ in range(2):
                o, _ = stickbreaking_attention(*(x.half() for x in tensors))
        self.assertEqual(o.dtype, torch.float16)
        self.assertEqual(sum("float16" in str(x.message) for x in said), 1)
        with self.assertRaisesRegex(ValueError, "multiple of 8"):
            stickbreaking_attention(*(x[..., :12].bfloat16() for x in tensors))

    def test_tensors_that_lie_in_other_ways(self):
        q, k, v = qkv(64)
        expected = output(q, k, v)
        wide = torch.cat([x.detach().flatten(1) for x in (q, k, v)], 1)
        parts = [x.unflatten(1, (-1, 64)) for x in wide.split([64 * H, 64 * G, 64 * G], 1)]
        self.assertTrue(torch.equal(output(*parts), expected))  # columns of one matrix
        odd = [torch.cat([x.detach(), x.detach()], 2)[..., 3:67] for x in (q, k, v)]
        moved = [x.roll(-3, 2) for x in (q.detach(), k.detach(), v.detach())]
        self.assertTrue(torch.equal(output(*odd), output(*moved)))  # at odd addresses

    def test_refusals_of_the_library_come_through(self):
        with self.assertRaises(kernels.AttentionError) as refused:
            kernels.call("sbtrain_stickbreaking_forward", kernels.StickBreaking(heads=4, head_dim=60))
        self.assertIn("head_dim", str(refused.exception))


if __name__ == "__main__":
    unittest.main()
