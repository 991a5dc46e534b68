#!/usr/bin/env python3
"""Fetches real English text from Debian or Ubuntu packages, without installing them.

    data/fetch_corpus.py [--small] [--output corpus/text]

The packages are downloaded by apt-get (no root needed), unpacked in memory, and their
documents written as plain text, one JSON object a line:

    <output>/train/<source>.jsonl         {"id": ..., "source": ..., "text": ...}
    <output>/validation/<source>.jsonl    a few per cent of the documents, by hash of their id

`sbtrain tokenizer train` and `sbtrain prepare` read these folders. The same packages always give
the same bytes. The script needs python3's standard library, apt-get and dpkg-deb.
"""
import argparse
import fnmatch
import gzip
import hashlib
import html.parser
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time

MIN_CHARACTERS = 400  # shorter documents are redirects, indices and stubs


class Corpus:
    """One source: the package that holds it, and what to read there.

    `package` is a pattern; `meta` is the release's package that depends on the default version,
    so that backports do not change the corpus.

    `rules` are tried in turn; the first whose patterns match any file is used alone, so that a
    package with both sources and HTML gives each document once.
    """

    def __init__(self, name, meta, package, rules, skip=()):
        self.name, self.meta, self.package = name, meta, package
        self.rules, self.skip = rules, skip


def corpora():
    return [
        Corpus("linux-doc", "linux-doc", r"linux-doc(-\d[\d.]*)?",
               [(["*/Documentation/*.rst"], plain),
                (["*/_sources/*.rst.txt", "*/linux-doc*/*.rst"], plain),
                (["*/linux-doc*/*.html"], html_text)],
               skip=["*/translations/*", "*/genindex*", "*/search.html"]),
        Corpus("anarchism", "anarchism", r"anarchism",
               [(["*/anarchism/html/*.html"], html_text),
                (["*/anarchism/markdown/*.md"], plain)]),
        Corpus("python-doc", "python3-doc", r"python3\.\d+-doc",
               [(["*/_sources/*.rst.txt"], plain),
                (["*/python3*/html/*.html"], html_text)],
               skip=["*/genindex*", "*/search.html"]),
        Corpus("perl-doc", "perl-doc", r"perl-doc", [(["*.pod"], pod_text)]),
        Corpus("postgresql-doc", "postgresql-doc", r"postgresql-doc-\d+",
               [(["*/html/*.html"], html_text)],
               skip=["*/bookindex.html", "*/release-*.html"]),
    ]


SMALL = {"linux-doc", "anarchism"}


# ---- Documents to text --------------------------------------------------------------------


def plain(text):
    return text


class TextOfHtml(html.parser.HTMLParser):
    """Text of an HTML page: blank lines separate paragraphs, and preformatted text stays as it is."""

    SKIP = {"script", "style", "head", "nav", "svg"}
    VOID = {"br", "hr", "img", "meta", "link", "input", "col", "wbr", "source", "area", "base"}
    PARAGRAPH = {"p", "div", "section", "article", "blockquote", "pre", "table", "ul", "ol", "dl",
                 "h1", "h2", "h3", "h4", "h5", "h6", "hr", "figure", "main", "body"}
    LINE = {"br", "li", "tr", "dt", "dd"}
    SKIP_CLASSES = ("navheader", "navfooter", "sphinxsidebar", "related", "headerlink")

    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.parts, self.skipped, self.pre = [], [], 0

    def break_line(self, count):
        # Newlines are collected as (count,) and merged with their neighbours at the end.
        self.parts.append(count)

    def handle_starttag(self, tag, attributes):
        classes = (dict(attributes).get("class") or "").split()
        if self.skipped or tag in self.SKIP or any(c in self.SKIP_CLASSES for c in classes):
            if tag not in self.VOID:
                self.skipped.append(tag)
            return
        if tag in self.PARAGRAPH:
            self.break_line(2)
        elif tag in self.LINE:
            self.break_line(1)
            if tag == "li":
                self.parts.append("- ")
        elif tag in ("td", "th"):
            self.parts.append(" ")
        if tag == "pre":
            self.pre += 1

    def handle_endtag(self, tag):
        if self.skipped:
            if tag in self.skipped:  # unclosed inner tags end with their parent
                while self.skipped.pop() != tag:
                    pass
            return
        if tag in self.PARAGRAPH:
            self.break_line(2)
        if tag == "pre" and self.pre:
            self.pre -= 1

    def handle_data(self, data):
        if not self.skipped:
            self.parts.append(data if self.pre else re.sub(r"\s+", " ", data))

    def text(self):
        out, pending, at_start = [], 0, True
        for part in self.parts:
            if isinstance(part, int):
                pending = max(pending, part)
                continue
            if pending or at_start:
                part = part.lstrip(" ")
            if not part:
                continue
            if pending and out:
                out.append("\n" * pending)
            elif out and out[-1].endswith(" "):
                part = part.lstrip(" ")
            out.append(part)
            pending, at_start = 0, False
        return "".join(out)


def join_bullets(text):
    """A bullet and the paragraph that belongs to it stand on one line."""
    return re.sub(r"^-[ ]*\n+(?=[^\n-])", "- ", text, flags=re.M)


def html_text(text):
    parser = TextOfHtml()
    parser.feed(text)
    parser.close()
    return join_bullets(parser.text())


POD_ESCAPES = {"lt": "<", "gt": ">", "verbar": "|", "sol": "/", "amp": "&", "quot": '"'}


def pod_text(text):
    """Perl's Plain Old Documentation without its markup."""
    def inline(match):
        kind, body = match.group(1), match.group(2)
        if kind in "XZ":
            return ""
        if kind == "E":
            return POD_ESCAPES.get(body, body if not body.isdigit() else chr(int(body)))
        if kind == "L":
            return body.split("|", 1)[0]
        return body

    lines, code = [], False
    for line in text.split("\n"):
        command = re.match(r"=([a-z]+\d?)\s*(.*)", line)
        if not command:
            if not code:
                lines.append(line)
            continue
        name, rest = command.groups()
        code = name == "cut"
        if name.startswith("head"):
            lines.append(rest)
        elif name == "item":
            lines.append("- " + rest.lstrip("* "))
    text = "\n".join(lines)
    text = re.sub(r"\b([A-Z])<<+\s(.*?)\s>>+", inline, text, flags=re.S)
    for _ in range(4):  # from the inside out
        text, count = re.subn(r"\b([A-Z])<([^<>]*)>", inline, text)
        if not count:
            break
    return join_bullets(text)


def clean(text):
    """Unix newlines, no trailing spaces, at most two blank lines, no control characters."""
    text = text.replace("\r\n", "\n").replace("\r", "\n").replace("\u00a0", " ")
    text = re.sub(r"[\x00-\x08\x0b-\x1f\x7f]", "", text)
    text = re.sub(r"[ \t]+\n", "\n", text)
    text = re.sub(r"\n{4,}", "\n\n\n", text)
    return text.strip() + "\n"


# ---- Packages -----------------------------------------------------------------------------


class FetchError(Exception):
    pass


class Apt:
    """Runs apt-get and apt-cache, with its own package lists where the system has none."""

    def __init__(self, cache):
        self.cache = pathlib.Path(cache)
        self.options = []
        for tool in ("apt-get", "apt-cache", "dpkg-deb"):
            if not shutil.which(tool):
                raise FetchError(f"{tool} not found: this script needs Debian or Ubuntu. On other "
                                 "systems, give `sbtrain prepare --input` your own text.")

    def run(self, *command):
        environment = dict(os.environ, LC_ALL="C", DEBIAN_FRONTEND="noninteractive")
        tool, *rest = command
        return subprocess.run([tool, *self.options, *rest], cwd=self.cache, env=environment,
                              stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def update(self):
        """Downloads package lists into the cache folder, which needs no root and changes nothing else."""
        state = (self.cache / "apt").resolve()
        (state / "lists" / "partial").mkdir(parents=True, exist_ok=True)
        (state / "archives" / "partial").mkdir(parents=True, exist_ok=True)
        self.options = ["-o", f"Dir::State::Lists={state}/lists", "-o", f"Dir::Cache={state}",
                        "-o", "APT::Sandbox::User="]
        print("reading package lists", file=sys.stderr)
        result = self.run("apt-get", "-qq", "-o", "Acquire::Retries=2",
                          "-o", "Acquire::http::Timeout=30", "update")
        if result.returncode or "Failed to fetch" in result.stderr:
            raise FetchError("apt-get update failed; is this machine connected to the network?\n"
                             + last_lines(result.stderr))

    def find(self, corpus):
        """The default version's package, else the newest whose whole name matches; or None."""
        meta = self.run("apt-cache", "show", "--no-all-versions", corpus.meta).stdout
        depends = re.search(r"^Depends: (.*)$", meta, flags=re.M)
        for name in re.findall(r"[a-z0-9][a-z0-9+.-]+", depends.group(1) if depends else ""):
            if re.fullmatch(corpus.package, name):
                return name
        if "Filename:" in meta and re.fullmatch(corpus.package, corpus.meta):
            return corpus.meta
        prefix = re.match(r"[a-z0-9-]+", corpus.package).group()
        result = self.run("apt-cache", "pkgnames", prefix)
        names = [n for n in result.stdout.split() if re.fullmatch(corpus.package, n)]
        return max(names, key=version_key, default=None)

    def download(self, name):
        result = self.run("apt-get", "-qq", "-o", "Acquire::Retries=2",
                          "-o", "Acquire::http::Timeout=30", "download", name)
        files = sorted(self.cache.glob(f"{name}_*.deb"), key=lambda p: p.stat().st_mtime)
        if result.returncode or not files:
            raise FetchError(f"cannot download package {name}; is this machine connected to the "
                             f"network?\n{last_lines(result.stderr)}")
        return files[-1]


def last_lines(text, count=4):
    return "\n".join("  " + line for line in text.strip().split("\n")[-count:])


def version_key(name):
    return [int(n) for n in re.findall(r"\d+", name)]


def get_package(apt, corpus):
    """Downloads the package's .deb, with fresh package lists where the system's are missing or stale."""
    name = apt.find(corpus)
    if name:
        try:
            return apt.download(name)
        except FetchError:
            if apt.options:
                raise
    if not apt.options:
        apt.update()
        return get_package(apt, corpus)
    raise FetchError(f"no package matches {corpus.package}; on Ubuntu, enable the 'universe' "
                     "component")


def read_package(deb):
    """{path: bytes} of the package's documentation files, decompressed, by path."""
    files = {}
    process = subprocess.Popen(["dpkg-deb", "--fsys-tarfile", str(deb)], stdout=subprocess.PIPE)
    try:
        with tarfile.open(fileobj=process.stdout, mode="r|") as archive:
            for member in archive:
                path = member.name.lstrip(".")
                stem = path[:-3] if path.endswith(".gz") else path
                if member.isfile() and stem.endswith((".rst", ".txt", ".html", ".md", ".pod")):
                    data = archive.extractfile(member).read()
                    files[stem] = gzip.decompress(data) if path.endswith(".gz") else data
    except (tarfile.TarError, OSError, EOFError) as error:
        raise FetchError(f"{deb}: {error}; delete it and try again") from error
    finally:
        process.stdout.close()
        process.wait()
    return files


def documents(corpus, files):
    """(id, text), sorted by id. An id has no version in it, so the validation split is stable."""
    for patterns, convert in corpus.rules:
        paths = [p for p in sorted(files)
                 if any(fnmatch.fnmatchcase(p, g) for g in patterns)
                 and not any(fnmatch.fnmatchcase(p, g) for g in corpus.skip)]
        if paths:
            break
    else:
        raise FetchError(f"{corpus.name}: the package holds no documents in a known place")
    root = os.path.commonpath([os.path.dirname(p) for p in paths])
    seen = set()
    for path in paths:
        text = clean(convert(files[path].decode("utf-8", errors="replace")))
        digest = hashlib.sha256(text.encode()).digest()
        if len(text) >= MIN_CHARACTERS and digest not in seen:
            seen.add(digest)
            yield f"{corpus.name}/{os.path.relpath(path, root)}", text


def is_validation(name, per_cent):
    digest = hashlib.sha256(name.encode()).digest()
    return int.from_bytes(digest[:8], "big") < per_cent / 100 * 2**64


def write_corpus(corpus, files, output, per_cent):
    """Writes both splits, each through a temporary file; returns (documents, bytes) of each."""
    counts = {"train": [0, 0], "validation": [0, 0]}
    paths = {split: output / split / f"{corpus.name}.jsonl" for split in counts}
    handles = {}
    try:
        for split, path in paths.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            handles[split] = open(f"{path}.tmp", "w", encoding="utf-8", newline="\n")
        for name, text in documents(corpus, files):
            split = "validation" if is_validation(name, per_cent) else "train"
            record = {"id": name, "source": corpus.name, "text": text}
            handles[split].write(json.dumps(record, ensure_ascii=False) + "\n")
            counts[split][0] += 1
            counts[split][1] += len(text.encode())
    finally:
        for handle in handles.values():
            handle.close()
    for path in paths.values():
        os.replace(f"{path}.tmp", path)
    return counts


def parse_arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true",
                        help="only " + " and ".join(sorted(SMALL)) + " (about 45 MB to download)")
    parser.add_argument("--output", type=pathlib.Path, default=pathlib.Path("corpus/text"),
                        help="folder to write (default: %(default)s)")
    parser.add_argument("--validation", type=float, default=3.0, metavar="PERCENT",
                        help="share of the documents held out (default: %(default)s)")
    parser.add_argument("--cache", type=pathlib.Path,
                        help="keep downloaded packages here (default: a temporary folder)")
    return parser.parse_args()


def fetch(arguments, cache):
    apt = Apt(cache)
    for corpus in corpora():
        if arguments.small and corpus.name not in SMALL:
            continue
        start = time.monotonic()
        cached = next((p for p in sorted(pathlib.Path(cache).glob("*.deb"))
                       if re.fullmatch(corpus.package, p.name.split("_")[0])), None)
        deb = cached or get_package(apt, corpus)
        counts = write_corpus(corpus, read_package(deb), arguments.output, arguments.validation)
        (train, train_bytes), (held, held_bytes) = counts["train"], counts["validation"]
        print(f"{corpus.name:15} {train:5} documents, {train_bytes / 1e6:5.1f} MB; validation "
              f"{held:3}, {held_bytes / 1e6:4.1f} MB  ({deb.name}, "
              f"{time.monotonic() - start:.0f} s)", flush=True)


def main():
    arguments = parse_arguments()
    if not 0 < arguments.validation < 100:
        sys.exit("--validation must be between 0 and 100")
    try:
        if arguments.cache:
            arguments.cache.mkdir(parents=True, exist_ok=True)
            fetch(arguments, arguments.cache)
        else:
            with tempfile.TemporaryDirectory(prefix="sbtrain-corpus-") as cache:
                fetch(arguments, cache)
    except (FetchError, OSError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("interrupted")
    print(f"text is in {arguments.output}/train and {arguments.output}/validation")


if __name__ == "__main__":
    main()
