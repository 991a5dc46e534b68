#!/usr/bin/env python3
"""The prompts of RULER's tasks in tests/data/text_tasks/samples.json, against RULER's own code.

RULER's generators, as lm-evaluation-harness has them, are given the random choices that a prompt shows, in
place of their own random numbers. They must then write the same prompt, character by character. Only the
folder lm_eval is needed, from `pip install lm-eval`, not what it depends on; SBTRAIN_LM_EVAL may name it.

Exit status: 0 equal, 1 not equal, 77 lm_eval or numpy is not installed.
"""
import importlib
import importlib.metadata
import importlib.util
import json
import math
import os
import pathlib
import re
import sys
import types
import uuid

SAMPLES = pathlib.Path(__file__).resolve().parents[1] / "data/text_tasks/samples.json"


def skip(reason):
    print(f"skipped: {reason}")
    sys.exit(77)


def load_ruler():
    """RULER's modules, without the packages that they take words, sentences and tokenizers from."""
    folder = os.environ.get("SBTRAIN_LM_EVAL")
    if not folder:
        spec = importlib.util.find_spec("lm_eval")
        if spec is None or not spec.submodule_search_locations:
            skip("lm_eval is not installed")
        folder = spec.submodule_search_locations[0]

    def package(name, **content):
        module = types.ModuleType(name)
        module.__dict__.update(content)
        sys.modules[name] = module
        return module

    for name, path in (("lm_eval", "."), ("lm_eval.tasks", "tasks"), ("lm_eval.tasks.ruler", "tasks/ruler")):
        package(name).__path__ = [str(pathlib.Path(folder) / path)]
    words = {"noun": ["x"], "adjective": ["y"], "verb": ["z"], "nouns": ["x"], "adjectives": ["y"], "verbs": ["z"]}
    package("wonderwords", RandomWord=lambda: types.SimpleNamespace(_categories=words))
    package("nltk", sent_tokenize=None, data=types.SimpleNamespace(find=lambda name: name))
    package("datasets", Dataset=None, Split=None)
    package("transformers", AutoTokenizer=None)
    package("tqdm", tqdm=lambda items, **_: items)
    package("scipy").special = package("scipy.special", zeta=lambda a: {2.0: math.pi**2 / 6}[a])
    version = importlib.metadata.version
    importlib.metadata.version = lambda name: "9.9.9" if name == "nltk" else version(name)
    return {name: importlib.import_module(f"lm_eval.tasks.ruler.{name}")
            for name in ("prepare_niah", "niah_utils", "vt_utils", "cwe_utils", "fwe_utils")}


class Choices:
    """Stands in for Python's random: gives what the prompt shows, in its order."""

    def __init__(self, **given):
        self.given = {name: iter(values) for name, values in given.items()}

    def __getattr__(self, name):
        return lambda *_, **__: next(self.given[name])

    def shuffle(self, items):
        order = next(self.given["shuffle"])
        assert sorted(items) == sorted(order), f"{sorted(items)} differ from {sorted(order)}"
        items[:] = order

    def Random(self, _seed):
        return self


def niah(ruler, sample):
    kind = sample["task"]
    has_uuids = kind == "niah_multikey_3"
    text = sample["prompt"]
    lines = text.split("\n")[1:-1]
    query = re.search(r"What is the special magic \w+ for (\S+) mentioned", text)[1]
    pairs = [re.fullmatch(r"One of the special magic \w+ for (\S+) is: (\S+)\.", line) for line in lines]
    needle = next(i for i, pair in enumerate(pairs) if pair and pair[1] == query)
    order = [pairs[needle]] + [pair for i, pair in enumerate(pairs) if pair and i != needle]
    numbers = [number for pair in order for number in pair.groups()]
    module = ruler["prepare_niah"]
    module.random = Choices(
        getrandbits=[uuid.UUID(n).int for n in numbers] if has_uuids else [],
        choice=[pair[1] for pair in order], randint=[pair[2] for pair in order],
        sample=[[needle], [0]], shuffle=[[f"One of the special magic {'uuid' if has_uuids else 'number'}s for "
                                          f"{order[0][1]} is: {order[0][2]}."]])
    haystack = "repeat" if kind == "niah_single_1" else "needle"
    arguments = {"num_needle_k": 1, "num_needle_v": 1, "type_haystack": haystack,
                 "type_needle_k": "uuids" if has_uuids else "words",
                 "type_needle_v": "uuids" if has_uuids else "numbers"}
    prompt, answers, asked = module.generate_input_output(
        sample["units"], module.get_haystack(haystack), template=ruler["niah_utils"].TEMPLATE, **arguments)
    value = arguments["type_needle_v"][:-1]
    return f"{prompt} The special magic {value} for {asked} mentioned in the provided text is", answers


def chain(ruler, text, lines, is_example):
    """The prompt of one chain of variables, from the choices that `text` shows."""
    import numpy
    context = text[text.index("text.\n\n") + 7:text.index("\nQuestion: ")]
    # RULER takes few lines of noise apart: each sentence, and the end of the line.
    noise = r"The grass is green\." if lines > 5 else r"(?:The|Here)[\w ]+\.|\n"
    items = re.findall(rf"VAR ([A-Z]+) = (?:VAR [A-Z]+|(\d+))|{noise}", context)
    names = [name for name, _ in items if name]
    value = next(number for _, number in items if number)
    at = [i for i, (name, _) in enumerate(items) if name]
    module = ruler["vt_utils"]
    module.random = Choices(choices=[list(name) for name in names], sample=[[i - j for j, i in enumerate(at)]])
    module.np = types.SimpleNamespace(random=Choices(randint=[value]))
    prompt, variables = module.generate_input_output(lines, 1, 4, is_icl=is_example)
    module.np = numpy
    assert len(names[0]) == (3 if is_example else 5)
    return prompt, variables


def vt(ruler, sample):
    text = sample["prompt"]
    begin = text.rindex("Memorize and track")
    example, names = chain(ruler, text[:begin], text[:begin].count("The grass is green."), True)
    question, answers = chain(ruler, text[begin:], sample["units"], False)
    return example + " " + " ".join(names) + "\n\n" + "\n\n" + question, answers


def cwe(ruler, sample):
    first, second = (part.split("\nQuestion")[0] for part in sample["prompt"].split("most often.\n")[1:])
    solved = re.search(r"in the list are:(.*)\n", sample["prompt"])[1]
    lists = [re.findall(r"\d+\. (\w+)", part) for part in (first, second)]
    common = [re.findall(r"\d+\. (\w+)", solved), sample["answers"]]
    module = ruler["cwe_utils"]
    module.random = Choices(sample=[top + sorted(set(words) - set(top)) for top, words in zip(common, lists)])
    module.RNG = Choices(shuffle=lists)
    example, prompt, answers = module.generate_input_output(sample["units"], sample["length"])
    return example + "\n" + prompt, answers


def fwe(ruler, sample):
    words = re.search(r"coded words\. (.*)\nQuestion", sample["prompt"])[1].split()
    shown = sorted(set(words) - {"..."} - set(sample["answers"]), key=lambda word: -words.count(word))
    size = sample["length"] // 50
    ranked = ["first!"] + sample["answers"] + shown
    ranked += [f"rare{i:02}" for i in range(size - len(ranked))]
    module = ruler["fwe_utils"]
    module.random = Choices(choices=[list(word) for word in ranked], shuffle=[ranked, words, words])
    tokenizer = lambda text: types.SimpleNamespace(input_ids=[])  # noqa: E731  everything fits
    prompt, answers, _ = module.generate_input_output(sample["length"], tokenizer, num_words=sample["units"],
                                                      vocab_size=size)
    return prompt, answers


def main():
    if importlib.util.find_spec("numpy") is None:
        skip("numpy is not installed")
    ruler = load_ruler()
    writers = {"niah": niah, "vt": vt, "cwe": cwe, "fwe": fwe}
    tokens = {"niah": 128, **{name: ruler[f"{name}_utils"].CONFIG for name in ("vt", "cwe", "fwe")}}
    tokens = {name: given if isinstance(given, int) else given.get("variable_tracking", given)["tokens_to_generate"]
              for name, given in tokens.items()}
    compared = 0
    for sample in json.loads(SAMPLES.read_text(encoding="utf-8")):
        family = sample["task"].split("_")[0]
        if family not in writers:
            continue
        prompt, answers = writers[family](ruler, sample)
        assert prompt == sample["prompt"], f"{sample['task']}:\n{prompt!r}\n{sample['prompt']!r}"
        assert answers == sample["answers"], (sample["task"], answers, sample["answers"])
        assert tokens[family] == sample["tokens_to_generate"], sample["task"]
        compared += 1
    print(f"{compared} prompts of RULER's code are equal")
    assert compared >= 10


if __name__ == "__main__":
    main()
