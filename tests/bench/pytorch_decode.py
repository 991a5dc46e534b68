#!/usr/bin/env python3
"""Generation by sbtrain and by transformers in the same run: tokens a second of 1, 8, 64 sequences.

    pytorch_decode.py --sbtrain build/release/sbtrain --config configs/tiny_sb.yaml [--device cuda]
        [--sequences 1,8,64] [--context 256] [--tokens 128] [--static]

`sbtrain export` writes the transformers model: of one layer of the configuration, since weights need not be
trained for this, and a checkpoint of all layers would take long to write. transformers then makes a model of
all layers with random weights from its config.json. Both continue random prompts of --context tokens, always
with the likeliest token; transformers' time for a token is the difference of two runs of generate(), with and
without the --tokens tokens, divided by them, so that the prompt does not count.

transformers runs as its users would run it: bf16 and scaled_dot_product_attention on a GPU, f32 on the CPU, its
dynamic cache; --static adds its static cache with torch.compile, which only models without code of their own
support. Exit status 77: PyTorch or transformers is not installed.
"""
import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

try:
    import torch
    import yaml
    from transformers import AutoConfig, AutoModelForCausalLM
except ImportError as error:
    print(f"skipped: {error}", file=sys.stderr)
    sys.exit(77)


def call(command, **options):
    done = subprocess.run(command, capture_output=True, text=True, **options)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def model_of(sbtrain, config):
    return yaml.safe_load(call([sbtrain, "config", "show", "--config", config]))["model"]


def exported_config(sbtrain, model, length, folder):
    """The folder that transformers loads the model's configuration, and its code, from."""
    exported = os.path.join(folder, "exported")
    one = os.path.join(folder, "one.yaml")
    with open(one, "w") as file:  # JSON is YAML
        json.dump({
            "name": "one",
            "device": "cpu",
            "model": model | {"layers": 1},
            "train": {"sequence_length": 64, "micro_batch": 1, "batch": 1},
            "data": {"task": {"type": "mqar", "pairs": 4, "examples": 1, "eval_examples": 1}},
            "stages": [{"name": "one", "length": "1 steps"}],
        }, file)
    call([sbtrain, "train", "--config", one], cwd=folder)
    runs = os.path.join(folder, "runs")
    run = os.path.join(runs, os.listdir(runs)[0])
    call([sbtrain, "export", "--checkpoint", run, "--output", exported, "--dtype", "bf16"])
    path = os.path.join(exported, "config.json")
    with open(path) as file:
        values = json.load(file)
    layers = model["layers"]
    values["num_hidden_layers"] = layers
    if "sbtrain" in values:  # of models with code of their own
        values["sbtrain"]["layers"] = layers
    values["max_position_embeddings"] = length
    if isinstance(values.get("layer_types"), list):
        values["layer_types"] = values["layer_types"] * layers
    with open(path, "w") as file:
        json.dump(values, file)
    return exported


def generate_seconds(model, device, ids, tokens, options):
    torch.manual_seed(1)
    begin = time.perf_counter()
    with torch.inference_mode():
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=tokens,
                       do_sample=False, **options)
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def transformers_rate(model, device, sequences, args, options):
    """Tokens a second of all sequences; the median of three differences."""
    ids = torch.randint(1, model.config.vocab_size, (sequences, args.context), device=device)
    few = 2
    generate_seconds(model, device, ids, few, options)  # compiles, allocates
    if options:
        generate_seconds(model, device, ids, args.tokens + few, options)
    steps = []
    for _ in range(3):
        less = generate_seconds(model, device, ids, few, options)
        more = generate_seconds(model, device, ids, args.tokens + few, options)
        steps.append((more - less) / args.tokens)
    return sequences / statistics.median(steps)


def sbtrain_rates(args):
    out = call([args.sbtrain, "bench", "decode", "--config", args.config, "--device", args.device, "--sequences",
                args.sequences, "--context", str(args.context), "--steps", str(args.tokens), "--json"])
    rows = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    return {row["sequences"]: row for row in rows}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sbtrain", required=True)
    parser.add_argument("--config", required=True)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--sequences", default="1,8,64")
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--static", action="store_true", help="also transformers' static cache, compiled")
    args = parser.parse_args()
    args.sbtrain = os.path.abspath(args.sbtrain)
    length = args.context + args.tokens + 64
    with tempfile.TemporaryDirectory() as folder:
        shape = model_of(args.sbtrain, args.config)
        exported = exported_config(args.sbtrain, shape, length, folder)
        config = AutoConfig.from_pretrained(exported, trust_remote_code=True)
        if config.num_hidden_layers != shape["layers"]:
            sys.exit(f"transformers' model has {config.num_hidden_layers} layers, not {shape['layers']}")
        dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
        torch.manual_seed(1)
        with torch.device(args.device):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=True).eval()
        model.generation_config.eos_token_id = None
        model.generation_config.pad_token_id = 0
        kinds = {"transformers": {}}
        if args.static:
            kinds["static cache, compiled"] = {"cache_implementation": "static"}
        ours = sbtrain_rates(args)
        print(f"{os.path.basename(args.config)}, {args.device}, tokens/s; transformers: {type(model).__name__}")
        print(f"{'sequences':>9}{'sbtrain':>12}" + "".join(f"{kind:>26}" for kind in kinds))
        for sequences in map(int, args.sequences.split(",")):
            row = f"{sequences:>9}{ours[sequences]['tokens_per_second']:>12.0f}"
            for options in kinds.values():
                row += f"{transformers_rate(model, args.device, sequences, args, options):>26.0f}"
            print(row, flush=True)


if __name__ == "__main__":
    main()
