#!/usr/bin/env python3
"""Times what a call of sbtrain's op in PyTorch costs the host in Python and in torch, without a GPU and without the library.

    pytorch_op_host.py [--repeats 1500] [--rounds 9] [--profile]

The code for GPUs runs on tensors of a CPU, with a stand-in for the library that computes nothing, and so without the time
that CUDA takes for launches: pytorch_op.py --parts overhead measures that too, on a GPU. Prints microseconds of the
process's CPU time for a call, the least of all rounds. "torch alone" is an autograd.Function of three tensors that
computes nothing either, which no op can be faster than. --profile prints where the time of a step goes.
"""
import argparse
import cProfile
import pathlib
import pstats
import sys
import time
import types

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "python/sbtrain-kernels"))  # behind an installed wheel
from pytorch_step import Nothing, torch  # noqa: E402

# The ops of tensors on a CPU are defined by the module for CUDA, which has to be known before sbtrain.torch is loaded.
stand_in = types.ModuleType("sbtrain.torch._cpu")
stand_in.__getattr__ = lambda name: getattr(sys.modules["sbtrain.torch._cuda"], name)
sys.modules[stand_in.__name__] = stand_in
from sbtrain import kernels  # noqa: E402
from sbtrain.torch import _cuda, softmax_attention, stickbreaking_attention, stickbreaking_decode  # noqa: E402


def microseconds(call, repeats, rounds):
    for _ in range(repeats // 10):
        call()
    times = []
    for _ in range(rounds):
        begin = time.process_time()
        for _ in range(repeats):
            call()
        times.append(time.process_time() - begin)
    return 1e6 * min(times) / repeats


def calls():
    """(what, function) of what is timed. One token, since the CPU takes the exponential of the remainder."""
    q, k, v = (torch.randn(1, 1, 24, 64, dtype=torch.bfloat16).requires_grad_() for _ in range(3))
    d_o = torch.randn_like(q)
    lengths = torch.ones(1, dtype=torch.int32)

    def without_gradients(function):
        with torch.no_grad():
            function()

    def step(function):
        torch.autograd.grad(function(q, k, v), (q, k, v), d_o)

    def stick(*x):
        return stickbreaking_attention(*x)[0]

    yield "stick-breaking, forward, no_grad", lambda: without_gradients(lambda: stick(q, k, v))
    yield "stick-breaking, forward", lambda: stick(q, k, v)
    yield "stick-breaking, forward and backward", lambda: step(stick)
    yield "softmax, forward and backward", lambda: step(softmax_attention)
    yield "decoding, no_grad", lambda: without_gradients(lambda: stickbreaking_decode(q[0], k, v, lengths))
    yield "torch alone, forward and backward", lambda: step(Nothing.apply)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=1500)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    kernels.call = lambda function, struct: None
    kernels.workspace = lambda kind, struct, backward: 4096
    _cuda.current_stream = lambda device: 0
    for what, call in calls():
        print(f"{what:40s}{microseconds(call, arguments.repeats, arguments.rounds):8.1f} us", flush=True)
    if arguments.profile:
        step = dict(calls())["stick-breaking, forward and backward"]
        with cProfile.Profile() as profile:
            for _ in range(arguments.repeats):
                step()
        pstats.Stats(profile).sort_stats("tottime").print_stats(25)


if __name__ == "__main__":
    main()
