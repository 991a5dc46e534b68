#!/usr/bin/env python3
"""Makes a corpus of code and documentation from Debian's packages: the same documents whenever and wherever it runs.

    data/package_corpus.py [--output corpus/packages]

It downloads the packages of data/package_corpus.list with apt-get, which needs no root and installs nothing, checks
them against the SHA-256 of that list, and writes into the output folder

    train-NN.jsonl.zst, held_out-NN.jsonl.zst   {"id": ..., "source": its kind, "package": ..., "text": ...}
    tokenizer.model                             32000 pieces, trained on a sample of the training text
    train.h5, held_out.h5                       the documents as tokens, for `data.sources` of a configuration
    manifest.json                               counts by kind, the packages, what was left out and why

docs/corpus.md says what is in it. The script needs Debian or Ubuntu, python3 with NumPy, zstd, and a built sbtrain.
"""
import argparse
import contextlib
import gzip
import hashlib
import heapq
import json
import os
import pathlib
import re
import subprocess
import sys
import tarfile
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field

import corpus_text
from fetch_corpus import FetchError, clean, html_text, last_lines, pod_text
from near_duplicates import SeenText

HERE = pathlib.Path(__file__).resolve().parent
KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"

TRAIN_SHARE = 0.5  # a document of which more than this has been seen before is a near-duplicate
HELD_OUT_SHARE = 0.2  # the same for held-out documents, of which that much may stand in the training text
# The share of documents that is held out, by the bytes from which it holds: more of the long ones, which are few.
HELD_OUT = ((450_000, 0.33), (60_000, 0.06), (0, 0.01))
JOINED_PAGES = 16_000  # manual pages of less than a quarter of it are joined until they have so many bytes
FRAME_BYTES = 16 << 20  # text in one frame of Zstandard
TOKENIZER_MEGABYTES = 64


class Wrong(Exception):
    """A list, package or option that cannot be used; the message says what to do."""


# ---- The list of packages -----------------------------------------------------------------


@dataclass
class Package:
    kind: str
    source: bool
    name: str
    version: str
    bytes: int  # of text, at most
    files: list = field(default_factory=list)  # (size, sha256, name)


def read_list(path):
    packages = []
    for number, line in enumerate(path.read_text().split("\n"), 1):
        words = line.split()
        if not words or line.startswith("#"):
            continue
        try:
            if line[0].isspace():
                size, sha256, name = words
                packages[-1].files.append((int(size), sha256, name))
            else:
                kind, form, name, version, megabytes = words
                packages.append(Package(kind, {"source": True, "binary": False}[form], name, version,
                                        int(float(megabytes) * 1e6)))
        except (ValueError, KeyError, IndexError):
            raise Wrong(f"{path}:{number}: neither KIND source|binary PACKAGE VERSION MEGABYTES nor, below such a "
                        "line and indented, SIZE SHA256 FILE") from None
    return packages


def write_list(path, packages, comments):
    with open(path, "w", encoding="utf-8") as file:
        file.write(comments)
        for package in packages:
            file.write(f"{package.kind} {'source' if package.source else 'binary'} {package.name} {package.version} "
                       f"{package.bytes / 1e6:g}\n")
            for size, sha256, name in package.files:
                file.write(f"  {size} {sha256} {name}\n")


# ---- Packages -----------------------------------------------------------------------------


class Mirror:
    """Debian's archive through apt-get, with settings and package lists of its own."""

    def __init__(self, url, folder):
        self.url, self.folder = url, folder
        state = folder / "apt"
        for name in ("lists/partial", "cache/archives/partial"):
            (state / name).mkdir(parents=True, exist_ok=True)
        signed = f"[signed-by={KEYRING}]"
        (state / "sources.list").write_text("".join(
            f"{form} {signed} {url} bookworm main non-free\n" for form in ("deb", "deb-src")))
        (state / "apt.conf").write_text(
            f'Dir::State::Lists "{state}/lists";\nDir::Cache "{state}/cache";\nDir::Etc::SourceList '
            f'"{state}/sources.list";\nDir::Etc::SourceParts "-";\nDir::State::status "/dev/null";\nAPT::Sandbox::User "";'
            '\nAPT::Architecture "amd64";\nAcquire::Languages "none";\nAcquire::Check-Valid-Until "false";\n'
            'Acquire::Retries "3";\nAcquire::http::Timeout "60";\n')
        self.environment = dict(os.environ, APT_CONFIG=str(state / "apt.conf"), LC_ALL="C")

    def run(self, *arguments):
        try:
            return subprocess.run(["apt-get", "-q", *arguments], cwd=self.folder, env=self.environment, text=True,
                                  stdout=subprocess.PIPE, stderr=subprocess.PIPE, check=False)
        except FileNotFoundError:
            raise FetchError("apt-get not found: this script needs Debian or Ubuntu") from None

    def update(self):
        result = self.run("update")
        if result.returncode or "Failed to fetch" in result.stderr:
            raise FetchError(f"cannot read the package lists of {self.url}: is this machine connected to the network, "
                             f"and is {KEYRING} there (package debian-archive-keyring)?\n{last_lines(result.stderr)}")

    def get(self, packages, *options):
        """apt-get source and apt-get download for the packages; both check what they download."""
        output = ""
        for source, command in ((True, ("source", "--download-only", "--tar-only")), (False, ("download",))):
            names = [f"{p.name}={p.version}" if p.version != "-" else p.name for p in packages if p.source == source]
            if not names:
                continue
            result = self.run(*command, *options, *names)
            if result.returncode:
                raise FetchError(explanation(self.url, result.stderr))
            output += result.stdout
        return output

    def pin(self, packages):
        """Sets versions and files to what the mirror has."""
        for source, command in ((True, ("showsrc", "--only-source")), (False, ("show",))):
            wanted = {package.name: package for package in packages if package.source == source}
            if not wanted:
                continue
            shown = subprocess.run(["apt-cache", *command, *wanted], env=self.environment, text=True,
                                   stdout=subprocess.PIPE, check=False).stdout
            found = {}
            for entry in map(fields_of, shown.strip().split("\n\n")):
                name = entry.get("Package")
                if name in wanted and (name not in found or is_later(entry["Version"], found[name]["Version"])):
                    found[name] = entry
            if missing := sorted(wanted.keys() - found.keys()):
                raise FetchError(f"{self.url} has no package {', '.join(missing)}")
            for name, entry in found.items():
                wanted[name].version, wanted[name].files = entry["Version"], files_of(entry)


def fields_of(entry):
    """The fields of an entry of apt-cache show or showsrc."""
    return dict(re.findall(r"^([^\s:]+): *(.*(?:\n[ \t].*)*)", entry, re.M))


def is_later(version, other):
    return subprocess.run(["dpkg", "--compare-versions", version, "gt", other], check=False).returncode == 0


def files_of(entry):
    """(size, sha256, name) of what apt-get downloads: the source without Debian's changes to it, or the package."""
    if "SHA256" in entry:
        version = entry["Version"].replace(":", "%3a")
        return [(int(entry["Size"]), entry["SHA256"], f"{entry['Package']}_{version}_{entry['Architecture']}.deb")]
    files = re.findall(r"^ *(\w{64}) (\d+) (\S+)$", entry["Checksums-Sha256"], re.M)
    return [(int(size), sha256, name) for sha256, size, name in files
            if re.search(r"\.tar\.\w+$", name) and ".debian.tar." not in name]


def explanation(url, errors):
    gone = re.findall(r"(?:of package|for) '([^']+)'|/([^/\s]+/[^/\s]+)  404 ", errors)
    if gone:
        names = ", ".join(sorted({package or file.split("/")[0] for package, file in gone}))
        return (f"{url} does not have the listed version of {names}. Other versions would be another corpus. "
                "Take a mirror that has it, such as --mirror http://snapshot.debian.org/archive/debian/20261124T000000Z "
                "(every version that Debian ever had, by date), or write a list of what this mirror has: --pin "
                f"mine.list, then --list mine.list\n{last_lines(errors)}")
    return f"cannot download packages from {url}\n{last_lines(errors)}"


def check_file(path, size, sha256):
    digest = hashlib.sha256()
    try:
        with open(path, "rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    except FileNotFoundError:
        raise FetchError(f"{path} has not been downloaded") from None
    if path.stat().st_size != size or digest.hexdigest() != sha256:
        raise FetchError(f"{path} is not the file of the list: {path.stat().st_size} bytes instead of {size}, or another "
                         "SHA-256. Delete it and try again")


# ---- From a package to its documents ------------------------------------------------------


class Sample:
    """Those files of a package whose hashes are smallest, of about a number of bytes: in whatever order they come."""

    def __init__(self, limit):
        self.limit, self.total, self.heap = limit, 0, []

    def add(self, path, data):
        heapq.heappush(self.heap, (-order(path), path, data))
        self.total += len(data)
        while self.total - len(self.heap[0][2]) >= self.limit:
            self.total -= len(heapq.heappop(self.heap)[2])

    def files(self):
        """(path, content), by hash of the path."""
        return [(path, data) for _, path, data in sorted(self.heap, key=lambda entry: (-entry[0], entry[1]))]


def order(text):
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()[:8], "big")


def members(archive, path):
    """(path, reader) of the files of a tar archive."""
    try:
        for member in archive:
            if member.isfile() and 0 < member.size <= 2 * corpus_text.MAX_BYTES:
                yield member.name, archive.extractfile(member)
    except (tarfile.TarError, OSError, EOFError) as error:
        raise FetchError(f"{path}: {error}; delete it and try again") from error


def source_documents(package, folder):
    """(path, kind, text) of a source package's files, in the order of the sample."""
    sample = Sample(2 * package.bytes)
    for _, _, name in package.files:
        with tarfile.open(folder / name, mode="r|*") as archive:
            for path, reader in members(archive, folder / name):
                inside = path.split("/", 1)[-1]
                if corpus_text.kind_of(inside):
                    sample.add(inside, reader.read())
    for path, data in sample.files():
        kind, text = corpus_text.kind_of(path), corpus_text.decode(data)
        if text is None:
            yield path, kind, None
            continue
        text = corpus_text.code_text(path, text)
        yield path, corpus_text.kind_by_content(kind, text), text


DOCUMENTATION = ((r"/man/.*\.\d\w*$", corpus_text.man_text), (r"/info/.*\.info(-\d+)?$", corpus_text.info_text),
                 (r"\.dict$", clean), (r"/RFC/.*\.txt$", corpus_text.rfc_text), (r"\.pod$", pod_text),
                 (r"\.(txt|md|rst|sgml|texi)$", clean), (r"^(?!.*/RFC/).*\.x?html$", html_text))


def conversion(path):
    """Its rank among the forms of a text, and the function that makes text of it."""
    for rank, (pattern, convert) in enumerate(DOCUMENTATION):
        if re.search(pattern, path):
            return rank, convert
    return None


def binary_files(package, folder):
    """(path, content) of the documentation in a binary package, by form and then by hash."""
    samples = {}
    for _, _, name in package.files:
        process = subprocess.Popen(["dpkg-deb", "--fsys-tarfile", folder / name], stdout=subprocess.PIPE)
        with process, tarfile.open(fileobj=process.stdout, mode="r|") as archive:
            for path, reader in members(archive, folder / name):
                stem = re.sub(r"\.(gz|dz)$", "", path.lstrip("."))
                form = conversion(stem)
                if not form or corpus_text.LEFT_OUT_NAMES.search(stem.rsplit("/", 1)[-1]):
                    continue
                data = reader.read()
                if stem != path.lstrip("."):
                    data = gzip.decompress(data)
                samples.setdefault(form[0], Sample(4 * package.bytes)).add(stem, data)
    return [file for _, sample in sorted(samples.items()) for file in sample.files()]


def joined_parts(files):
    """Manuals in Info format, whose parts are numbered, as one file each; and short manual pages together."""
    info, pages = {}, {}
    for path, text in files:
        if part := re.fullmatch(r"(.*/info/.*\.info)(?:-(\d+))?", path):
            info.setdefault(part.group(1), []).append((int(part.group(2) or 0), text))
        elif re.search(DOCUMENTATION[0][0], path):
            pages[path] = text
        else:
            yield path, text
    for path, parts in info.items():
        yield path, "\n".join(text for _, text in sorted(parts))
    yield from joined_pages(sorted(pages.items()))


def joined_pages(pages):
    held, names = "", []
    for path, text in pages:
        if len(text) >= JOINED_PAGES / 4:
            yield path, text
            continue
        names, held = [*names, path], held + text + "\n"
        if len(held) >= JOINED_PAGES:
            yield f"{names[0]}..{os.path.basename(names[-1])}", held
            held, names = "", []
    if held:
        yield f"{names[0]}..{os.path.basename(names[-1])}", held


def binary_documents(package, folder):
    """(path, kind, text) of a binary package's documentation."""
    texts = []
    for path, data in binary_files(package, folder):
        text = corpus_text.decode(data)
        if text is None:
            yield path, package.kind, None
            continue
        texts.append((path, clean(conversion(path)[1](text))))
    for path, text in joined_parts(texts):
        yield path.removeprefix("/usr/share/").removeprefix("doc/"), package.kind, text


# ---- Documents to the corpus --------------------------------------------------------------


@dataclass
class Document:
    id: str
    kind: str
    package: str
    offset: int  # in the spool
    bytes: int
    held_out: bool


class Spool:
    """The documents on disk while they are collected: in the end they are written in the order of a hash."""

    def __init__(self, folder):
        self.file = open(folder / "spool", "w+b")
        self.documents, self.seen, self.left_out = [], SeenText(), Counter()

    def collect(self, package, folder):
        documents = source_documents if package.source else binary_documents
        taken = 0
        for path, kind, text in documents(package, folder):
            if taken >= package.bytes:
                break
            reason = "not UTF-8" if text is None else corpus_text.fault(text)
            if reason:
                self.left_out[reason] += 1
                continue
            taken += self.add(f"{package.name}/{path}", kind, package.name, text)
        return taken

    def add(self, name, kind, package, text):
        """Takes a document unless it is a near-duplicate; held-out ones are compared at the end. Returns its bytes."""
        data = text.encode()
        held_out = is_held_out(name, len(data))
        if not held_out and not self.seen.take(data, TRAIN_SHARE):
            self.left_out["near-duplicate"] += 1
            return 0
        self.documents.append(Document(name, kind, package, self.file.seek(0, os.SEEK_END), len(data), held_out))
        self.file.write(data)
        return len(data)

    def text(self, document):
        self.file.seek(document.offset)
        return self.file.read(document.bytes)

    def split(self, held_out):
        """The documents of a split, by hash of their ids. Held-out ones that the training text repeats are left out."""
        documents = sorted((d for d in self.documents if d.held_out == held_out), key=lambda d: order(d.id))
        if not held_out:
            return documents
        kept = [d for d in documents if self.seen.take(self.text(d), HELD_OUT_SHARE)]
        self.left_out["held out, but repeated in the training text"] = len(documents) - len(kept)
        return kept


def is_held_out(name, size):
    share = next(share for least, share in HELD_OUT if size >= least)
    return order(name) < share * 2**64


def compressed(data):
    try:
        return subprocess.run(["zstd", "-q", "-12", "-c"], input=data, stdout=subprocess.PIPE, check=True).stdout
    except FileNotFoundError:
        raise Wrong("zstd not found: apt-get install zstd") from None


class Parts:
    """Files NAME-NN.jsonl.zst of at most `limit` bytes each (0: one file), of frames that can be read alone."""

    def __init__(self, output, name, limit):
        self.output, self.name, self.limit = output, name, limit
        self.files, self.lines, self.size = [], [], 0

    def add(self, line):
        self.lines.append(line)
        self.size += len(line)
        if self.size >= (min(FRAME_BYTES, self.limit) if self.limit else FRAME_BYTES):
            self.flush()

    def flush(self):
        if not self.lines:
            return
        frame = compressed(b"".join(self.lines))
        if not self.files or self.limit and self.files[-1]["bytes"] + len(frame) > self.limit:
            self.files.append({"name": f"{self.name}-{len(self.files):02}.jsonl.zst", "bytes": 0, "documents": 0})
        part = self.files[-1]
        with open(self.output / f"{part['name']}.tmp", "ab" if part["bytes"] else "wb") as file:
            file.write(frame)
        part["bytes"] += len(frame)
        part["documents"] += len(self.lines)
        self.lines, self.size = [], 0

    def finish(self):
        self.flush()
        for part in self.files:
            path = self.output / part["name"]
            os.replace(f"{path}.tmp", path)
            part["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
        return self.files


def write_split(spool, held_out, output, limit):
    """Writes the documents of a split; returns its files and the SHA-256 of its lines."""
    parts, digest = Parts(output, "held_out" if held_out else "train", limit), hashlib.sha256()
    for document in spool.split(held_out):
        record = {"id": document.id, "source": document.kind, "package": document.package,
                  "text": spool.text(document).decode()}
        line = json.dumps(record, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"
        digest.update(line)
        parts.add(line)
    return {"files": parts.finish(), "sha256_of_lines": digest.hexdigest()}


# ---- Tokens -------------------------------------------------------------------------------


def sbtrain(*arguments):
    program = subprocess.run([HERE.parent / "scripts" / "find_sbtrain.sh"], stdout=subprocess.PIPE, text=True)
    if program.returncode:
        raise Wrong("--no-tokens writes the text without sbtrain")
    result = subprocess.run([program.stdout.strip(), *map(str, arguments)], stdout=subprocess.PIPE, text=True)
    if result.returncode:
        raise Wrong(f"sbtrain {arguments[0]} failed, as it says above; the text is complete")
    return result.stdout


def prepare(output, splits, vocab):
    """Trains the tokenizer, makes both stores, and adds their counts to the splits."""
    tokenizer = output / "tokenizer.model"
    sbtrain("tokenizer", "train", "--input", output / splits["train"]["files"][0]["name"], "--vocab", vocab,
            "--max-megabytes", TOKENIZER_MEGABYTES, "--output", tokenizer)
    for name, split in splits.items():
        store = output / f"{name}.h5"
        sbtrain("prepare", "--input", *(output / part["name"] for part in split["files"]), "--tokenizer", tokenizer,
                "--output", store)
        split.update(counts(sbtrain("data", "info", store)))


def counts(info):
    """What `sbtrain data info` says of a store: totals, counts by kind, documents by length."""
    result = {key: int(re.search(rf"^  {key} +(\d+)", info, re.M).group(1)) for key in ("documents", "tokens")}
    head, lengths = info.split("length in tokens")
    kinds = re.findall(r"^  (\S.*?) +(\d+) +(\d+) +(\d+) +[\d.]+%$", head, re.M)
    result["bytes"] = sum(int(size) for *_, size in kinds)
    result["kinds"] = {kind: {"documents": int(documents), "tokens": int(tokens), "bytes": int(size)}
                       for kind, documents, tokens, size in sorted(kinds)}
    bins = [[int(word) for word in words] for words in re.findall(r"^  (\d+) to \d+ +(\d+) +(\d+)", lengths, re.M)]
    result["longer_than"] = {str(least): sum(documents for low, documents, _ in bins if low >= least)
                             for least in (2048, 16384, 131072)}
    return result


# ---- The command --------------------------------------------------------------------------


def make(arguments, packages, cache, scratch):
    start = time.monotonic()
    if not arguments.offline:
        mirror = Mirror(arguments.mirror, cache)
        print(f"downloading {sum(size for p in packages for size, _, _ in p.files) / 1e9:.2f} GB", flush=True)
        mirror.update()
        mirror.get(packages)
    spool = Spool(scratch)
    for package in packages:
        for size, sha256, name in package.files:
            check_file(cache / name, size, sha256)
        taken = spool.collect(package, cache)
        print(f"{package.name:28} {taken / 1e6:6.1f} MB  {time.monotonic() - start:5.0f} s", flush=True)
    limit = int(arguments.part_size * (1 << 20))
    splits = {name: write_split(spool, name == "held_out", arguments.output, limit) for name in ("train", "held_out")}
    print(f"text is written after {time.monotonic() - start:.0f} s", flush=True)
    if not arguments.no_tokens:
        prepare(arguments.output, splits, arguments.vocab)
    manifest = {"list": {"name": arguments.list.name, "sha256": hashlib.sha256(arguments.list.read_bytes()).hexdigest()},
                "splits": splits, "left_out": dict(sorted(spool.left_out.items())),
                "packages": {p.name: {"version": p.version, **package_counts(spool, p)} for p in packages}}
    with open(arguments.output / "manifest.json", "w", encoding="utf-8") as file:
        file.write(json.dumps(manifest, indent=1) + "\n")
    for name, split in splits.items():
        print(f"{name}: {split.get('documents', '?')} documents, {split.get('tokens', '?')} tokens in "
              f"{len(split['files'])} files")
    print(f"complete after {time.monotonic() - start:.0f} s: {arguments.output}/manifest.json has the counts")


def package_counts(spool, package):
    sizes = [d.bytes for d in spool.documents if d.package == package.name]
    return {"documents": len(sizes), "bytes": sum(sizes)}


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("corpus/packages"),
                        help="folder to write (default: %(default)s)")
    parser.add_argument("--list", type=pathlib.Path, default=HERE / "package_corpus.list",
                        help="packages, with their versions and checksums (default: %(default)s)")
    parser.add_argument("--mirror", default="http://deb.debian.org/debian", metavar="URL",
                        help="where apt-get finds Debian 12 (default: %(default)s)")
    parser.add_argument("--cache", type=pathlib.Path, help="keep downloaded packages here (default: a temporary folder)")
    parser.add_argument("--offline", action="store_true", help="take the packages of --cache, without a network")
    parser.add_argument("--part-size", type=float, default=60, metavar="MIB",
                        help="split the text into files of at most this size; 0: one file (default: %(default)s)")
    parser.add_argument("--vocab", type=int, default=32000, help="pieces of the tokenizer (default: %(default)s)")
    parser.add_argument("--no-tokens", action="store_true", help="write the text alone, without sbtrain")
    parser.add_argument("--pin", type=pathlib.Path, metavar="LIST",
                        help="write a list of the same packages in the versions that the mirror has, and end")
    arguments = parser.parse_args()
    if arguments.offline and not arguments.cache:
        parser.error("--offline needs --cache, the folder with the packages")
    if arguments.part_size < 0:
        parser.error("--part-size is 0 or more")
    return arguments


def run(arguments):
    packages = read_list(arguments.list)
    arguments.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".making-", dir=arguments.output) as scratch:
        scratch = pathlib.Path(scratch)
        cache = (arguments.cache or scratch).resolve()
        cache.mkdir(parents=True, exist_ok=True)
        if not arguments.pin:
            return make(arguments, packages, cache, scratch)
        mirror = Mirror(arguments.mirror, cache)
        mirror.update()
        mirror.pin(packages)
        comments = "".join(line + "\n" for line in arguments.list.read_text().split("\n") if line.startswith("#"))
        write_list(arguments.pin, packages, comments)


def main():
    try:
        run(parse_arguments())
    except (Wrong, FetchError, OSError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("interrupted")


if __name__ == "__main__":
    main()
