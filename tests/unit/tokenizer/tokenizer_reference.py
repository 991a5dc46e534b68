#!/usr/bin/env python3
"""Makes tokenizers of the kinds that sbtrain reads, and what their own libraries do with hostile text.

  tokenizer_reference.py families OUT [--count N] [--only NAME]   one folder for each family
  tokenizer_reference.py golden OUT                              the small set of tests/data/tokenizer
  tokenizer_reference.py tokens OUT... [--count N]                what each OUT/tokenizer.json gives
  tokenizer_reference.py sentencepiece OUT [--count N]            models of sentencepiece, one folder for each

The tokenizers are trained on text of this repository with the normaliser, pre-tokenizer, post-processor
and added tokens that the published ones have. Each folder gets the tokenizer and expected.jsonl, one
object on each line: a text, its ids with special tokens as text ("ids") and as tokens ("special"), and
the decoded ids. Needs the packages tokenizers and tiktoken, or sentencepiece; without them it ends with exit
code 77.
"""

import argparse
import base64
import functools
import json
import pathlib
import random
import sys
import unicodedata

try:
    import tiktoken
    import tokenizers
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers
    from tokenizers import pre_tokenizers, processors, trainers
except ImportError as missing:
    if "sentencepiece" not in sys.argv:
        print(missing)
        sys.exit(77)

if "sentencepiece" in sys.argv:
    try:
        import sentencepiece
    except ImportError as missing:
        print(missing)
        sys.exit(77)

ROOT = pathlib.Path(__file__).resolve().parents[3]

LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
          r"|\s*[\r\n]+|\s+(?!\S)|\s+")
QWEN = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
GPT2 = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
CL100K = (r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"""
          r"""|\s++$|\s*[\r\n]|\s+(?!\S)|\s""")
O200K = "|".join([
    r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
    r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
    r"""\p{N}{1,3}""", r""" ?[^\s\p{L}\p{N}]+[\r\n/]*""", r"""\s*[\r\n]+""", r"""\s+(?!\S)""", r"""\s+"""])

OTHER_LANGUAGES = """
Die Größe der Übung überrascht. Ça va très bien, où êtes-vous? El niño comió piñas mañana. Привет, мир и люди!
Съешь же ещё этих мягких французских булок. 今日は良い天気ですね。我们都是好朋友，你好世界。안녕하세요 세계 여러분.
שלום עולם. مرحبا بالعالم العربي. नमस्ते दुनिया कैसे हो. Γειά σου Κόσμε. สวัสดีชาวโลก. 👩‍💻🇳🇴👍🏽 x² ½ Ⅷ ①
"""


@functools.cache
def corpus():
    texts = [json.loads(line)["text"] for line in (ROOT / "tests/data/english.jsonl").open(encoding="utf-8")]
    return texts + [OTHER_LANGUAGES * 20]


# ---- the families


def byte_level(pre, vocab, normalizer=None, specials=(), ignore_merges=False, added=()):
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=vocab, special_tokens=[],
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator(corpus(), trainer)
    tokenizer.add_special_tokens(list(specials))
    if added:
        tokenizer.add_tokens(list(added))
    return tokenizer


def split(pattern):
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"),
                                    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def gpt2(vocab=2000):
    tokenizer = byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False), vocab,
                           specials=[AddedToken("<|endoftext|>", normalized=True, special=True)])
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return tokenizer


def llama3(vocab=2000):
    names = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    tokenizer = byte_level(split(LLAMA3), vocab, ignore_merges=True,
                           specials=[AddedToken(n, normalized=False, special=True) for n in names])
    tokenizer.post_processor = processors.Sequence([
        processors.ByteLevel(trim_offsets=True),
        processors.TemplateProcessing("<|begin_of_text|> $A", "<|begin_of_text|> $A $B",
                                      [("<|begin_of_text|>", tokenizer.token_to_id("<|begin_of_text|>"))])])
    return tokenizer


def qwen(vocab=2000):
    names = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer = byte_level(split(QWEN), vocab, normalizer=normalizers.NFC(),
                           specials=[AddedToken(n, normalized=False, special=True) for n in names],
                           added=[AddedToken("<tool_call>", normalized=False, special=False),
                                  AddedToken("</tool_call>", normalized=False, special=False)])
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return tokenizer


def smollm2(vocab=2000):
    pre = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True),
                                   pre_tokenizers.ByteLevel(add_prefix_space=False)])
    return byte_level(pre, vocab, specials=[AddedToken(n, normalized=False, special=True)
                                            for n in ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]])


def flags(vocab=2000):
    """Added tokens with every flag, and a Split by a plain string. (The Rust library decodes added tokens of
    Latin-1 letters to single bytes, which is an error of its own, so there are none here.)"""
    pre = pre_tokenizers.Sequence([pre_tokenizers.Split("--", "isolated"),
                                   pre_tokenizers.Digits(individual_digits=False),
                                   pre_tokenizers.ByteLevel(add_prefix_space=False)])
    return byte_level(
        pre, vocab, normalizer=normalizers.Sequence([normalizers.NFC()]),
        specials=[AddedToken("<mask>", lstrip=True, special=True, normalized=False),
                  AddedToken("<|pad|>", rstrip=True, special=True, normalized=False)],
        added=[AddedToken("word", single_word=True, normalized=False), AddedToken("wordy", normalized=False),
               AddedToken("\u03b1\u0301", normalized=True), AddedToken("\u4f60\u597d", normalized=True),
               AddedToken("  ", normalized=False), AddedToken("both", lstrip=True, rstrip=True, normalized=True)])


def ranks_of(tokenizer):
    """The ranks that tiktoken would have for a trained byte-level BPE without added tokens."""
    alphabet = {}
    free = 0
    for byte in range(256):
        printable = 0x21 <= byte <= 0x7E or 0xA1 <= byte <= 0xAC or 0xAE <= byte <= 0xFF
        alphabet[chr(byte if printable else 0x100 + free)] = byte
        free += not printable
    vocab = tokenizer.get_vocab(with_added_tokens=False)
    ordered = sorted(vocab, key=vocab.get)
    return {bytes(alphabet[c] for c in token): rank for rank, token in enumerate(ordered)}


HUGGING_FACE = {"gpt2": gpt2, "llama3": llama3, "qwen": qwen, "smollm2": smollm2, "flags": flags}
LLAMA3_SPECIALS = {"<|begin_of_text|>": 0, "<|end_of_text|>": 1, "<|start_header_id|>": 6, "<|end_header_id|>": 7,
                   "<|eot_id|>": 9}
TIKTOKEN = {"gpt2": (GPT2, {"<|endoftext|>": 50256}),
            "cl100k_base": (CL100K, {"<|endoftext|>": 100257, "<|fim_prefix|>": 100258, "<|endofprompt|>": 100276}),
            "o200k_base": (O200K, {"<|endoftext|>": 199999, "<|endofprompt|>": 200018}),
            "llama3": (LLAMA3, None)}

# ---- hostile text


@functools.cache
def characters(old_unicode):
    """Every assigned character but surrogates, the marks among them, and the numbers. Python 3.11 knows Unicode 14; the
    Rust library's NFC does not know the marks of later versions than the old one."""
    everything = [chr(c) for c in range(0xF0000) if unicodedata.category(chr(c)) not in ("Cn", "Cs")]
    if old_unicode:
        everything = [c for c in everything if unicodedata.ucd_3_2_0.category(c) != "Cn"]
    return (everything, [c for c in everything if unicodedata.combining(c)],
            [c for c in everything if unicodedata.category(c)[0] == "N"])


class Hostile:
    def __init__(self, seed, contents, old_unicode=False):
        self.random = random.Random(seed)
        self.everything, self.marks, self.numbers = characters(old_unicode)
        self.spaces = list(" \t\n\r\v\f\x1c\x1f\x85\xa0\u1680\u180e\u2000\u200a\u200b\u2028\u2029\u202f\u205f\u3000\ufeff")
        self.jamo = [chr(c) for c in [*range(0x1100, 0x1113), *range(0x1161, 0x1176), *range(0x11A8, 0x11C3)]]
        self.words = [w for text in corpus() for w in text.split()]
        self.words_and_spaces = self.words + self.spaces
        self.contents = list(contents)
        self.pieces = ["'s", "'S", "'ll", "'LL", "'\u017f", "\u2019s", "'re", "'RE", "'t", "'ve", "'m", "'d", "''", "--",
                       "word", "wordy", "password", "caf\u0065\u0301", "\u03b1\u0301", "\u03ac", "\u4f60\u597d", "both", "  ", "\r\n",
                       "\n\n", "a/\n", "\x00", "\ufffd", "\u00c5\u212b", "\u1e9b\u0323", "\U0001d7d8", "\u0130", "1234567"]

    def piece(self):
        r = self.random
        kind = r.randrange(12)
        if kind == 0:
            return "".join(r.choices(self.everything, k=r.randrange(1, 6)))
        if kind == 1:
            return "".join(r.choices(self.spaces, k=r.randrange(1, 6)))
        if kind == 2:
            return "".join(r.choices(self.numbers, k=r.randrange(1, 6)))
        if kind == 3:
            return r.choice("aeoAE\u0915\u05d0") + "".join(r.choices(self.marks, k=r.randrange(1, 6)))
        if kind == 4:
            return "".join(r.choices(self.jamo, k=r.randrange(1, 6)))
        if kind == 5:
            return r.choice(self.contents)
        if kind == 6:
            content = r.choice(self.contents)
            cut = r.randrange(len(content))
            return content[:cut] if r.random() < 0.5 else content[cut:]
        if kind == 7:
            return r.choice(self.pieces)
        if kind == 8:
            return r.choice(self.words_and_spaces) * r.choice([1, 2, 3, 5, 40])
        return r.choice(["", " ", " "]) + r.choice(self.words)

    def text(self):
        return "".join(self.piece() for _ in range(self.random.randrange(1, 14)))

    def texts(self, count):
        n = min(1000, count // 3)
        fixed = ["", " ", "a", "a" * 3 * n, " " * 3 * n, "\n" * 3 * n, "ab" * 2 * n, "\u0301" * n, "1" * n, "'" * n,
                 "\u4f60" * n, "\U0001f469\u200d" * n, "<" * n, "a\n" * n, " \n" * n, "\t " * n]
        return fixed + [self.text() for _ in range(count - len(fixed))]


def write_lines(path, rows):
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, separators=(",", ":")) + "\n")


def expect_hugging_face(tokenizer, folder, count, seed=1):
    contents = [t.content for t in tokenizer.get_added_tokens_decoder().values()]
    rows = []
    for text in Hostile(seed, contents, old_unicode=tokenizer.normalizer is not None).texts(count):
        tokenizer.encode_special_tokens = True
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        tokenizer.encode_special_tokens = False
        special = tokenizer.encode(text, add_special_tokens=False).ids
        rows.append({"text": text, "ids": ids, "special": special,
                     "decoded": tokenizer.decode(ids, skip_special_tokens=True)})
    write_lines(folder / "expected.jsonl", rows)


def expect_tiktoken(encoding, folder, count, seed=1):
    rows = []
    for text in Hostile(seed, encoding.special_tokens_set).texts(count):
        ids = encoding.encode_ordinary(text)
        rows.append({"text": text, "ids": ids, "special": encoding.encode(text, allowed_special="all"),
                     "decoded": encoding.decode(ids)})
    write_lines(folder / "expected.jsonl", rows)


def make_hugging_face(name, folder, count, vocab=2000):
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = HUGGING_FACE[name](vocab)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    expect_hugging_face(tokenizer, folder, count)


def make_tiktoken(name, folder, count, vocab=2000):
    folder.mkdir(parents=True, exist_ok=True)
    ranks = ranks_of(byte_level(split(LLAMA3), vocab))
    pattern, specials = TIKTOKEN[name]
    if specials is None:
        specials = {content: len(ranks) + i for content, i in LLAMA3_SPECIALS.items()}
    lines = [base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items()]
    (folder / f"{name}.tiktoken").write_bytes(b"".join(lines))
    encoding = tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=specials)
    expect_tiktoken(encoding, folder, count)


# ---- sentencepiece

PLAIN = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False, "byte_fallback": True}
# Unigram models are left out: which of equally likely pieces they choose depends on the library's version.
SENTENCEPIECE = {
    "llama": {**PLAIN, "model_type": "bpe", "split_digits": True},  # puts a space before each text
    "whitespace": {**PLAIN, "model_type": "bpe", "add_dummy_prefix": False, "allow_whitespace_only_pieces": True},
    "nfkc": {"model_type": "bpe", "byte_fallback": True},
    "unknown": {"model_type": "bpe"},  # has unknown characters
}


def expect_sentencepiece(folder, count, seed=1):
    """Decoded without the mark of unknown characters, for which sbtrain has no text, and with the space before a
    text, which sentencepiece takes away again."""
    model = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    dummy_prefix = model.encode("a", out_type=str)[0].startswith("\u2581")
    rows = []
    for text in Hostile(seed, ["<s>", "</s>", "<unk>", "<0x41>", "\u2581", "\u2581\u2581"]).texts(count):
        ids = model.encode(text)
        decoded = model.decode(ids).replace(" \u2047 ", "")
        if dummy_prefix and ids and model.id_to_piece(ids[0]).startswith("\u2581"):
            decoded = " " + decoded
        rows.append({"text": text, "ids": ids, "special": ids, "decoded": decoded})
    write_lines(folder / "expected.jsonl", rows)


def make_sentencepiece(name, folder, count, vocab=2000):
    folder.mkdir(parents=True, exist_ok=True)
    lines = [line for text in corpus() for line in text.splitlines()]
    with (folder / "tokenizer.model").open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(lines), model_writer=file, vocab_size=vocab,
                                                 minloglevel=3, num_threads=1, **SENTENCEPIECE[name])
    expect_sentencepiece(folder, count)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["families", "golden", "tokens", "sentencepiece"])
    parser.add_argument("out", type=pathlib.Path, nargs="+")
    parser.add_argument("--count", type=int, default=10000)
    parser.add_argument("--only", default="")
    args = parser.parse_args()
    if args.what == "tokens":  # of the tokenizer.json that is there
        for folder in args.out:
            expect_hugging_face(Tokenizer.from_file(str(folder / "tokenizer.json")), folder, args.count)
        return
    if len(args.out) != 1:
        parser.error(f"{args.what} takes one folder")
    args.out = args.out[0]
    if args.what == "golden":
        make_hugging_face("qwen", args.out / "qwen", 120, vocab=500)
        make_hugging_face("llama3", args.out / "llama3", 120, vocab=500)
        make_tiktoken("o200k_base", args.out / "o200k_base", 120, vocab=500)
        return
    if args.what == "sentencepiece":
        for name in SENTENCEPIECE:
            if args.only in ("", name):
                make_sentencepiece(name, args.out / name, args.count)
        return
    for name in HUGGING_FACE:
        if args.only in ("", "hf_" + name):
            make_hugging_face(name, args.out / ("hf_" + name), args.count)
    for name in TIKTOKEN:
        if args.only in ("", "tiktoken_" + name):
            make_tiktoken(name, args.out / ("tiktoken_" + name), args.count)


if __name__ == "__main__":
    main()
