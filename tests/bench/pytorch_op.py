#!/usr/bin/env python3
"""Times sbtrain's op in PyTorch on a GPU, beside the Triton kernels of flash-linear-attention and of the authors.

    pytorch_op.py [--names sbtrain,fla,authors] [--parts kernels,overhead,model,compiled] [--limit SECONDS] [--total SECONDS]
                  [--head-dims 64,128] [--lengths 2048,4096,16384] [--tokens 32768] [--width 1536] [--batch 4] [--steps 10]
                  [--stickbreaking FOLDER] [--json] [--device cpu]

kernels   forward and backward pass on the same random numbers; TFLOP/s count 4 d L^2 / 2 for each head and sequence
          forward, 2.5 times that backward. Random logits use sticks up soon, so sbtrain's skipping is off.
overhead  microseconds that the host takes for a call, forward and with its backward pass, on a pack so small that the GPU
          does not matter; of these the library behind the op; of a step that is replayed as a CUDA graph, for the host and
          for the GPU; and of the step of an op that computes nothing, which is torch's own time.
          (pytorch_op_host.py measures Python's and torch's part without a GPU.)
model     tokens per second of a step (forward, backward, no optimizer) of flash-linear-attention's
          StickBreakingAttentionForCausalLM in the shape of configs/1b_sb.yaml. sbtrain: after patch(), without skipping
          and, as "skipping", as patch() leaves it.
compiled  tokens per second of a step of the same shape in PyTorch as a careful user would write it (pytorch_gpu.py).

Rows are shown as they come, and at the end one table. Each name runs in a process of its own. A part that fails or that
takes longer than --limit seconds (120) ends it, and a new process goes on with the next part; after --total seconds (290)
everything ends with what there is. Triton compiles and tries 27 variants of flash-linear-attention's kernels first, here
in several processes at once. Packages: flash-linear-attention's ops are in `fla-core` (with `einops`), its models in
`flash-linear-attention` (with `transformers`). The authors' kernels are the package `stickbreaking_attention`, installed
or in FOLDER (default: $STICKBREAKING_ATTENTION); it is in no registry of packages.

SBTRAIN_ATTENTION_LIBRARY names the library where the wheel sbtrain-kernels is not installed. What is not installed is left
out with a message. --device cpu runs the code on tiny shapes, as a check. Exit status 1: a part failed or ran out of time;
77: no PyTorch or no GPU.
"""
import argparse
import contextlib
import functools
import gc
import importlib.util
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "python/sbtrain-kernels"))  # behind an installed wheel
import pytorch_gpu  # noqa: E402
from pytorch_attention import time_calls  # noqa: E402
from pytorch_step import Nothing, torch  # noqa: E402

import sbtrain.torch.fla  # noqa: E402
from sbtrain import kernels as library  # noqa: E402
from sbtrain.torch import stickbreaking_attention  # noqa: E402

NAMES = ("sbtrain", "fla", "authors")
PACKAGES = {"fla": "fla", "authors": "stickbreaking_attention"}
COLD_BYTES = 256 << 20
MODEL_1B = {
    "hidden_size": 1536, "num_hidden_layers": 40, "num_heads": 24, "intermediate_size": 4096, "vocab_size": 49152,
    "tie_word_embeddings": True, "use_cache": False,
}
CONFIG_1B = {
    "model": {"layers": 40, "width": 1536, "inner": 4096, "heads": 24, "vocab": 49152, "tied": True},
    "train": {"sequence_length": 4096},
}
CONFIG_TINY = {
    "model": {"layers": 1, "width": 64, "inner": 64, "heads": 2, "vocab": 64, "tied": True},
    "train": {"sequence_length": 32},
}


@functools.lru_cache(maxsize=None)
def say(text):
    """Prints it once."""
    print(text, file=sys.stderr, flush=True)


# ---- What is timed ----------------------------------------------------------------------------------------------


def attention_of(name, arguments):
    """o of q, k and v [B, L, H, d] by the kernels of this name, or None with a message."""
    if name == "sbtrain":
        return lambda q, k, v: stickbreaking_attention(q, k, v, skip_epsilon=0.0)[0]
    if name == "fla":
        try:
            from fla.ops.stickbreaking_attn import parallel_stickbreaking_attn
        except (ImportError, RuntimeError) as error:
            return say(f"fla: not available ({error})")
        return lambda q, k, v: parallel_stickbreaking_attn(q, k, v)[0]
    kernel, why = pytorch_gpu.published_stickbreaking(arguments.stickbreaking)
    if kernel is None:
        return say(f"authors: not available ({why})")

    def attend(q, k, v):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return kernel(q, k, v, inv_temp=q.shape[-1] ** -0.5)[0].transpose(1, 2)

    return attend


def fla_models():
    """Its classes of a model and its configuration, or None with a message."""
    try:
        from fla.models import StickBreakingAttentionConfig, StickBreakingAttentionForCausalLM
    except (ImportError, RuntimeError) as error:
        return say(f"model: flash-linear-attention is not available ({error})")
    return StickBreakingAttentionForCausalLM, StickBreakingAttentionConfig


def autotuners():
    """flash-linear-attention's stick-breaking kernels, as what tries their variants."""
    import fla.ops.stickbreaking_attn.parallel as module

    for kernel in vars(module).values():
        while kernel is not None and not hasattr(kernel, "configs"):
            kernel = getattr(kernel, "fn", None)
        if kernel is not None:
            yield kernel


def compile_variant(variant, arguments):
    """Lets Triton compile a variant of each kernel into its cache on the disk, for the shapes of all parts."""
    for kernel in autotuners():
        kernel.configs = kernel.configs[variant : variant + 1] or kernel.configs[:1]
    attend = attention_of("fla", arguments)
    for head_dim in arguments.head_dims:
        for length in (128, 1024):
            q, k, v = small_inputs(arguments, head_dim, length)
            attend(q, k, v).sum().backward()
    torch.cuda.synchronize()


def warm_up(arguments):
    """Compiles all variants at once, each in a process, since Triton compiles one after the other. Whoever needs longer
    than half of the limit is left to the timed process."""
    begin = time.perf_counter()
    count = max(len(kernel.configs) for kernel in autotuners())
    command = own_command(arguments, "fla", arguments.parts)
    children = [
        subprocess.Popen([*command, "--compile-variant", str(n)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        for n in range(count)
    ]
    failed = []
    for child in children:
        try:
            _, errors = child.communicate(timeout=max(1.0, arguments.limit / 2 - (time.perf_counter() - begin)))
            if child.returncode != 0:
                failed.append((errors.strip().splitlines() or ["no text"])[-1])
        except subprocess.TimeoutExpired:
            child.kill()
            child.communicate()
            failed.append("too slow")
    text = f"fla: {count} variants of its kernels compiled in {time.perf_counter() - begin:.0f} s"
    say(text if not failed else f"{text}, {len(failed)} of them not: {failed[0]}")


# ---- The parts --------------------------------------------------------------------------------------------------


def seconds_of(calls, arguments):
    """Median seconds of a call."""
    if arguments.device == "cuda":
        return time_calls(calls, arguments.steps)
    begin = time.perf_counter()
    for call in calls:
        call()
    return (time.perf_counter() - begin) / len(calls)


def inputs(arguments, head_dim, length):
    """Sets of q, k, v and do, so many that none is in the L2 cache when it is used again."""
    shape = (arguments.tokens // length, length, arguments.width // head_dim, head_dim)
    count = min(64, COLD_BYTES // (8 * arguments.tokens * arguments.width) + 2) if arguments.device == "cuda" else 1
    options = {"device": arguments.device, "dtype": torch.bfloat16}
    return [[torch.randn(shape, **options).requires_grad_(i < 3) for i in range(4)] for _ in range(count)]


def small_inputs(arguments, head_dim, length):
    """q, k and v. With the other parts' heads, since flash-linear-attention compiles anew for another number."""
    shape = (1, length, arguments.width // head_dim, head_dim)
    return [torch.randn(shape, device=arguments.device, dtype=torch.bfloat16).requires_grad_() for _ in range(3)]


def kernels(name, arguments):
    function = attention_of(name, arguments)
    if function is None:
        return
    for head_dim in arguments.head_dims:
        for length in arguments.lengths:
            sets = inputs(arguments, head_dim, length)
            flops = 2 * arguments.width * length * arguments.tokens
            forward = seconds_of([lambda x=x: function(*x[:3]) for x in sets], arguments)
            outputs = [(function(*x[:3]), x) for x in sets]
            backward = seconds_of(
                [lambda o=o, x=x: torch.autograd.grad(o, x[:3], x[3], retain_graph=True) for o, x in outputs], arguments
            )
            yield {
                "part": "kernels", "name": name, "d": head_dim, "L": length, "forward_ms": 1e3 * forward,
                "forward_tflops": 1e-12 * flops / forward, "backward_ms": 1e3 * backward,
                "backward_tflops": 2.5e-12 * flops / backward,
            }


def host_seconds(call, repeats=200):
    """Seconds of the host for a call, without waiting for the device."""
    for _ in range(10):
        call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(repeats):
        call()
    seconds = (time.perf_counter() - begin) / repeats
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return seconds


def library_seconds(call, repeats=200):
    """Seconds of a call that are spent in the functions of the C interface."""
    original, spent = library.call, [0.0]

    def timed(function, struct):
        begin = time.perf_counter()
        original(function, struct)
        spent[0] += time.perf_counter() - begin

    library.call = timed
    try:
        for n in range(10 + repeats):
            if n == 10:
                spent[0] = 0.0
            call()
    finally:
        library.call = original
    return spent[0] / repeats


def overhead(name, arguments):
    function = attention_of(name, arguments)
    if function is None:
        return
    q, k, v = small_inputs(arguments, arguments.head_dims[0], 128)
    d_o = torch.randn_like(q)

    def forward():
        with torch.no_grad():
            function(q, k, v)

    def step(function=function):
        torch.autograd.grad(function(q, k, v), (q, k, v), d_o)

    row = {"part": "overhead", "name": name, "forward_us": 1e6 * host_seconds(forward), "step_us": 1e6 * host_seconds(step)}
    row["torch_step_us"] = 1e6 * host_seconds(lambda: step(Nothing.apply))
    if name == "sbtrain" and arguments.device == "cuda":
        row["library_forward_us"] = 1e6 * library_seconds(forward)
        row["library_step_us"] = 1e6 * library_seconds(step)
    if arguments.device == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        row["graph_us"] = 1e6 * host_seconds(graph.replay)
        row["graph_gpu_us"] = 1e6 * time_calls([lambda: [graph.replay() for _ in range(20)]], 10) / 20
    yield row


def model(name, arguments):
    if name == "authors":
        return
    classes = fla_models()
    if classes is None:
        return
    if arguments.device == "cpu":
        return say("model: its layers refuse to run without a GPU")
    Model, Config = classes
    with torch.device(arguments.device):  # a billion random numbers take a CPU half a minute
        network = Model(Config(**MODEL_1B)).to(torch.bfloat16)
    ids = torch.randint(MODEL_1B["vocab_size"], (arguments.batch, 4096), device=arguments.device)

    def step():
        network.zero_grad(set_to_none=True)
        network(input_ids=ids, labels=ids).loss.backward()

    def row(name):
        for _ in range(3):
            step()
        torch.cuda.reset_peak_memory_stats()
        seconds = time_calls([step], arguments.steps)
        return {
            "part": "model", "name": name, "tokens": ids.numel(), "step_ms": 1e3 * seconds,
            "tokens_per_second": ids.numel() / seconds, "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        }

    if name == "fla":
        yield row(name)
        return
    sbtrain.torch.fla.patch()
    sbtrain.torch.fla.stickbreaking_attention = functools.partial(stickbreaking_attention, skip_epsilon=0.0)
    yield row(name)
    sbtrain.torch.fla.stickbreaking_attention = stickbreaking_attention
    yield row("skipping")


def compiled(name, arguments):
    if attention_of(name, arguments) is None:
        return
    on_gpu = arguments.device == "cuda"
    options = argparse.Namespace(
        batch=arguments.batch, steps=arguments.steps, warmup=3, device=arguments.device, sdpa="any", compile=on_gpu,
        compile_mode="default", bf16_parameters=False, stickbreaking=arguments.stickbreaking if name == "authors" else name
    )
    if not on_gpu and name != "sbtrain":
        return
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    result = pytorch_gpu.measure(CONFIG_1B if on_gpu else CONFIG_TINY, options)
    yield {
        "part": "compiled", "name": name, "tokens": result["tokens_per_step"], "step_ms": 1e3 * result["step_seconds"],
        "tokens_per_second": result["tokens_per_second"], "peak_gib": result["memory_bytes"] / 2**30,
    }


PARTS = {"kernels": kernels, "overhead": overhead, "model": model, "compiled": compiled}

# ---- Rows and the table -----------------------------------------------------------------------------------------


def show(row):
    numbers = [f"{key} {value:.1f}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items()]
    return "  ".join(x.removeprefix("part ").removeprefix("name ").ljust(12) for x in numbers)


def cells(row):
    """(what, number) of a row for the table."""
    if row["part"] == "kernels":
        speeds = f"{row['forward_tflops']:.0f} / {row['backward_tflops']:.0f}"
        return [(f"d {row['d']}, L {row['L']}: TFLOP/s forward / backward", speeds)]
    if row["part"] == "overhead":
        texts = {
            "forward_us": "host, forward (µs)", "step_us": "host, forward and backward (µs)",
            "library_forward_us": "of these in the library, forward (µs)", "library_step_us": "in the library, both (µs)",
            "torch_step_us": "an op that computes nothing, both (µs)", "graph_us": "replayed as a CUDA graph, both (µs)",
            "graph_gpu_us": "the GPU's time for that (µs)",
        }
        return [(text, f"{row[key]:.1f}") for key, text in texts.items() if key in row]
    text = {"model": "flash-linear-attention's 1B model", "compiled": "compiled PyTorch model, 1B"}[row["part"]]
    return [(f"{text}: tokens/s", f"{row['tokens_per_second']:.0f}")]


def table(rows):
    """One line for what was timed, one column for each name."""
    names = list(dict.fromkeys(row["name"] for row in rows))
    lines = {}
    for row in rows:
        for what, number in cells(row):
            lines.setdefault(what, {})[row["name"]] = number
    widths = [max(len(what) for what in lines), *(max(12, len(name)) for name in names)]
    for what, numbers in [("", dict(zip(names, names))), *lines.items()]:
        texts = [what, *(numbers.get(name, "") for name in names)]
        yield "| " + " | ".join(text.ljust(width) for text, width in zip(texts, widths)) + " |"
        if what == "":
            yield "|" + "|".join("-" * (width + 2) for width in widths) + "|"


# ---- Processes --------------------------------------------------------------------------------------------------


def own_command(arguments, name, parts):
    command = [sys.executable, __file__, "--child", "--json", "--names", name, "--parts", ",".join(parts)]
    for key in ("tokens", "width", "batch", "steps", "device", "stickbreaking", "limit"):
        command += [f"--{key}", str(getattr(arguments, key))]
    for key in ("head_dims", "lengths"):
        command += [f"--{key.replace('_', '-')}", ",".join(map(str, getattr(arguments, key)))]
    return command


class Child:
    """A process for some parts of one name, with a limit for each that `end`, the end of everything, may shorten."""

    def __init__(self, arguments, name, parts, end):
        self.limit, self.end, self.timer, self.late = arguments.limit, end, None, False
        command = own_command(arguments, name, parts)
        # A session of its own, so that the processes that compile for it end with it.
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
        self.allow()

    def allow(self):
        """Begins the time of the next part."""
        if self.timer is not None:
            self.timer.cancel()
        self.timer = threading.Timer(max(0.0, min(self.limit, self.end - time.perf_counter())), self.stop)
        self.timer.start()

    def stop(self):
        self.late = True
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.killpg(self.process.pid, signal.SIGKILL)

    def lines(self):
        """What it prints in JSON, until it ends."""
        try:
            for line in self.process.stdout:
                if line.startswith("{"):
                    yield json.loads(line)
        except BaseException:
            self.stop()
            raise
        finally:
            self.timer.cancel()
            self.process.wait()


def rows_of_children(name, arguments, failed, end):
    """The rows of all parts for one name, as they come."""
    package = PACKAGES.get(name)
    if package is not None and importlib.util.find_spec(package) is None:
        return say(f"{name}: left out, since the package {package} is not installed")
    left = list(arguments.parts)
    while left and time.perf_counter() < end:
        child, part = Child(arguments, name, left, end), None
        for line in child.lines():
            if "begins" not in line:
                yield line
                continue
            child.allow()
            part = line["begins"]
            left = left[left.index(part) + 1 :] if part in left else left
        if child.process.returncode == 0:
            return
        if child.late:
            say(f"{name}, {part or 'start'}: ended, its time was up")
        elif child.process.returncode != 1:  # which says itself what has failed
            say(f"{name}, {part or 'start'}: failed with status {child.process.returncode}")
        failed.append(part)
        if part is None:
            return
    if left:
        say(f"{name}: no time was left for {', '.join(left)}")
        failed.extend(left)


def begin(part, arguments):
    if arguments.child:
        print(json.dumps({"begins": part}), flush=True)


def rows_of(name, arguments, failed):
    """The rows of all parts. The names of parts that fail go into `failed`; a child ends with the first one, since an
    error of the GPU would stay with its process."""
    if name == "fla" and arguments.device == "cuda" and attention_of(name, arguments) is not None:
        begin("warm-up", arguments)
        warm_up(arguments)
    for part in arguments.parts:
        begin(part, arguments)
        try:
            yield from PARTS[part](name, arguments)
        except Exception as error:  # the other parts are worth their time
            say(f"{name}, {part}: {type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}")
            failed.append(part)
            if arguments.child:
                return
        gc.collect()
        if arguments.device == "cuda":
            torch.cuda.empty_cache()


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--names", default=",".join(NAMES))
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--limit", type=float, default=120, help="seconds for each part of each name")
    parser.add_argument("--total", type=float, default=290, help="seconds for everything")
    parser.add_argument("--head-dims", default="64,128")
    parser.add_argument("--lengths", default="2048,4096,16384")
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--width", type=int, default=1536)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--stickbreaking", metavar="FOLDER", default=os.environ.get("STICKBREAKING_ATTENTION", ""))
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--json", action="store_true", help="one JSON object a row, and no table")
    parser.add_argument("--compile-variant", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    for key in ("head_dims", "lengths"):
        setattr(arguments, key, [int(x) for x in getattr(arguments, key).split(",")])
    for key, known in (("names", NAMES), ("parts", PARTS)):
        given = getattr(arguments, key).split(",")
        setattr(arguments, key, given)
        for value in given:
            if value not in known:
                parser.error(f"--{key}: '{value}' is not one of {', '.join(known)}")
    if arguments.device == "cpu":
        arguments.tokens, arguments.width, arguments.lengths = 64, 128, [32]
    elif not torch.cuda.is_available():
        pytorch_gpu.fail_unavailable("a CUDA device")
    return arguments


def main():
    arguments = parse()
    if arguments.compile_variant is not None:
        compile_variant(arguments.compile_variant, arguments)
        return 0
    rows, failed, end = [], [], time.perf_counter() + arguments.total
    if arguments.stickbreaking:
        sys.path.append(arguments.stickbreaking)
    for name in arguments.names:
        for row in rows_of(name, arguments, failed) if arguments.child else rows_of_children(name, arguments, failed, end):
            rows.append(row)
            print(json.dumps(row) if arguments.json else show(row), flush=True)
    if rows and not arguments.json:
        print("", *table(rows), sep="\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
