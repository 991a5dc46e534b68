"""Computes the logits of an exported model and compares them with those of sbtrain.

    python3 verify_logits.py packages KIND
    python3 verify_logits.py compare KIND FOLDER REFERENCE

KIND is `transformers`, or `own` for SbtrainForCausalLM, which PyTorch alone can compute where transformers is
missing. The last line of `packages` is `found` where they are there. REFERENCE is a safetensors file with `tokens`
[T] and `logits` [T, V]. The last line of `compare` says how far the logits are apart. Exit status: 0 they agree
within 1e-4 of the largest, 1 they do not, 77 a package is missing.
"""
import sys

if sys.path and sys.path[0] == "":  # of `python3 -c`: no module is looked for in the working folder
    del sys.path[0]

import ctypes
import json
import os
import signal
import struct
import warnings

PR_SET_PDEATHSIG = 1
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)  # it ends when sbtrain does

TOLERANCE = 1e-4
DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "I32": "int32"}


def read_safetensors(path):
    """{name: tensor}. The package safetensors is not needed."""
    import torch

    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
        tensors = {}
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            begin, end = entry["data_offsets"]
            file.seek(8 + length + begin)
            dtype = getattr(torch, DTYPES[entry["dtype"]])
            data = torch.frombuffer(bytearray(file.read(end - begin)), dtype=dtype)
            tensors[name] = data.reshape(entry["shape"])
        return tensors


def read_weights(folder):
    index = os.path.join(folder, "model.safetensors.index.json")
    files = ["model.safetensors"]
    if os.path.exists(index):
        with open(index) as file:
            files = sorted(set(json.load(file)["weight_map"].values()))
    return {k: v for name in files for k, v in read_safetensors(os.path.join(folder, name)).items()}


def own_logits(folder, tokens):
    sys.path.insert(0, folder)
    from modeling_sbtrain import SbtrainPlain

    with open(os.path.join(folder, "config.json")) as file:
        model = SbtrainPlain(json.load(file)["sbtrain"])
    model.load_state_dict({k: v.float() for k, v in read_weights(folder).items()})
    return model.eval()(tokens[None])[0]


def transformers_logits(folder, tokens):
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    if hasattr(transformers.logging, "disable_progress_bar"):
        transformers.logging.disable_progress_bar()
    model, problems = transformers.AutoModelForCausalLM.from_pretrained(
        folder, trust_remote_code=True, dtype=torch.float32, output_loading_info=True
    )
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if problems.get(kind):
            print(f"transformers reports {kind}: {sorted(problems[kind])}")
            sys.exit(1)
    return model.eval()(input_ids=tokens[None]).logits[0]


def main():
    warnings.simplefilter("ignore")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.dont_write_bytecode = True  # the folder is to hold the model and nothing else
    action, kind = sys.argv[1:3]
    try:
        import torch

        try:
            import transformers  # noqa: F401

            plain = False
        except ImportError:
            if kind != "own":
                raise
            plain = True
    except ImportError as error:
        print(error)
        return 77
    if action == "packages":
        print("found")
        return 0
    folder, reference = sys.argv[3:5]
    expected = read_safetensors(reference)
    tokens, ours = expected["tokens"].long(), expected["logits"]
    with torch.no_grad():
        theirs = (own_logits if plain else transformers_logits)(folder, tokens).float()
    if theirs.shape != ours.shape:
        print(f"logits of shape {list(theirs.shape)}, expected {list(ours.shape)}")
        return 1
    largest = float(ours.abs().max())
    difference = float((theirs - ours).abs().max())
    bound = TOLERANCE * max(largest, 1.0)
    agrees = difference <= bound  # false for NaN
    program = f"PyTorch {torch.__version__}" if plain else f"transformers {transformers.__version__}"
    print(
        f"{program}: the logits of {len(tokens)} tokens differ by at most {difference:.2g}, "
        f"{'within' if agrees else 'beyond'} {bound:.2g}; the largest is {largest:.3g}"
    )
    return 0 if agrees else 1


if __name__ == "__main__":
    sys.exit(main())
