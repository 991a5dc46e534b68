"""What data/package_corpus.py makes of a file: which kind of text it is, its conversion, and what is left out.

Everything here is a function of a file's name and content alone, so that the same packages give the same documents.
"""
import re
import zlib

from fetch_corpus import clean, html_text, pod_text

MIN_BYTES = 1_000  # shorter files are stubs, redirects and lists of includes
MAX_BYTES = 4_000_000  # longer files are data in the form of text
FIRST_COMMENTS = 4  # so many comments at the beginning of a file are searched for a licence

# ---- Kinds --------------------------------------------------------------------------------

LANGUAGES = {
    "ada": "adb ads", "agda": "agda lagda", "assembly": "s asm", "awk": "awk", "c": "c h", "c#": "cs",
    "c++": "cc cpp cxx hh hpp hxx ipp tcc", "clojure": "clj cljc cljs", "cmake": "cmake", "crystal": "cr", "cuda": "cu",
    "d": "d", "elixir": "ex exs", "erlang": "erl hrl", "forth": "fs fth", "fortran": "f f77 f90 f95 for",
    "gap": "g gi gd", "go": "go", "haskell": "hs lhs", "haxe": "hx", "java": "java", "javascript": "js jsx mjs",
    "kotlin": "kt", "lisp": "el lisp lsp", "lua": "lua", "matlab or objective-c": "m", "nim": "nim", "ocaml": "ml mli",
    "pascal": "lpr pas pp", "perl": "pl pm", "php": "php", "python": "py pyx", "r": "r", "ruby": "rb", "rust": "rs",
    "scala": "scala", "scheme": "rkt scm ss", "shader": "frag glsl vert", "shell": "sh", "sql": "sql",
    "tcl": "tcl", "tex": "dtx sty tex", "typescript": "ts tsx", "vala": "vala", "verilog": "sv v", "vhdl": "vhd vhdl",
    "documentation": "adoc md org pod rst texi texinfo txt",
}
KIND_OF_EXTENSION = {extension: kind for kind, names in LANGUAGES.items() for extension in names.split()}
MARKUP = {"html": html_text, "htm": html_text, "xhtml": html_text, "pod": pod_text}

# Licences and lists of changes stand in every package, catalogues of translations repeat the text of the program,
# and what the others name is made by a program or is the input or expected output of one.
LEFT_OUT_NAMES = re.compile(
    r"(^|/)(copying|copyright|licen[cs]es?|changelog|changes|authors|credits|thanks|maintainers|gpl|lgpl|fdl"
    r"|cmakelists\.txt|requirements[^/]*\.txt|configure|ltmain\.sh|aclocal\.m4|config\.(guess|sub))([.-][^/]*)?$"
    r"|(^|/)(po|locales?|i18n|l10n|nls|translations?|testdata|test-data|fixtures|snapshots?|golden|expected|autogen"
    r"|generated|gen|node_modules|baselines?|__snapshots__)/"
    r"|[._-]min\.js$|\.(pb|pb2|pb\.gw|generated|gen|g)\.[a-z]+$|_(pb2|pb2_grpc|generated|gen)\.[a-z]+$"
    r"|(^|/)(zz_generated|moc_|ui_|qrc_)[^/]*$|(^|/)(bundle|jquery[^/]*)\.js$|(genindex|searchindex|search)[^/]*$",
    re.IGNORECASE)


def kind_of(path):
    """The kind of a file by its name, or None where it is none of these."""
    if LEFT_OUT_NAMES.search(path):
        return None
    name = path.rsplit("/", 1)[-1]
    return KIND_OF_EXTENSION.get(name.rsplit(".", 1)[-1].lower()) if "." in name else None


def kind_by_content(kind, text):
    """Tells languages apart that share an extension."""
    if kind == "verilog" and "endmodule" not in text:
        return "coq"
    if kind == "perl" and ":-" in text and not re.search(r"\b(my|sub|use|package)\b", text):
        return "prolog"
    if kind == "forth" and not re.search(r"^: \S", text, flags=re.M):
        return "f#"
    return kind


# ---- Markup to text -----------------------------------------------------------------------

ROFF_FONT = re.compile(r"\\f(\(..|\[[^\]]*\]|.)|\\s[+-]?\d+|\\[&|^%:)/,]|\\\*(\(..|\[[^\]]*\]|.)")
ROFF_CHARACTERS = {"aq": "'", "dq": '"', "bu": "*", "em": "—", "en": "–", "hy": "-", "mi": "-", "co": "©", "rs": "\\",
                   "lq": "“", "rq": "”", "oq": "‘", "cq": "’", "ti": "~", "ha": "^", "ga": "`", "la": "<", "ra": ">"}
ROFF_WORDS = set("B I BR RB BI IB RI IR SM SB UR UE MT ME TQ IP "
                 "Ad Ao Ar Bq Cd Cm Dq Dv Em Er Ev Fa Fl Fn Ft Ic It Li Nd Nm No Op Pa Pf Pq Ql Qq Sq Sx Sy Va Vt Xr"
                 .split())


def roff_line(text):
    text = ROFF_FONT.sub("", text)
    text = re.sub(r"\\\((..)|\\\[([^\]]*)\]", lambda m: ROFF_CHARACTERS.get(m.group(1) or m.group(2), ""), text)
    return text.replace("\\-", "-").replace("\\e", "\\").replace("\\~", " ").replace("\\ ", " ").replace("\\c", "")


def roff_words(name, text):
    """The arguments of a macro. mdoc's arguments may be macros themselves; those without a sign of their own go."""
    words = [quoted or bare for quoted, bare in re.findall(r'"([^"]*)"|(\S+)', text)]
    if len(name) == 2 and name[1].islower():
        words = ["-" if word == "Fl" else word for word in [name, *words] if word == "Fl" or word not in ROFF_WORDS]
        return " ".join(words).replace("- ", "-")
    return ("" if name in ("BR", "RB", "BI", "IB", "RI", "IR") else " ").join(words)


def man_text(text):
    """A manual page (man(7) and mdoc(7)) without its macros."""
    lines, definition = [], False
    for line in text.split("\n"):
        if definition or re.match(r"[.']\s*(de|ig)\b", line):
            definition = not re.match(r"\.\.", line)
            continue
        macro = re.match(r"[.']\s*([A-Za-z]{1,2})(?:\s+(.*))?$", line)
        if not macro:
            if not line.startswith((".", "'")):
                lines.append(roff_line(line))
            continue
        name, rest = macro.group(1), re.sub(r'\\".*', "", macro.group(2) or "")
        if name in ("SH", "SS", "Sh", "Ss", "TH", "Dt"):
            lines += ["", roff_line(roff_words("SM", rest)), ""]
        elif name in ("PP", "P", "LP", "Pp", "TP", "HP", "sp", "IP", "It"):
            lines.append("")
        if name in ROFF_WORDS and rest:
            lines.append(roff_line(roff_words(name, rest)))
    return "\n".join(lines)


def info_text(text):
    """A manual in Info format without the lines that lead from node to node."""
    nodes = [node for node in text.split("\x1f") if not re.match(r"\n(Tag Table|Indirect|End Tag Table|Local)", node)]
    return re.sub(r"^File: [^\n]*\n", "", "".join(node.lstrip("\n\x0c") for node in nodes[1:]), flags=re.M)


def rfc_text(text):
    """An RFC without the feet and heads of its pages."""
    text = re.sub(r"\n*[^\n]*\[Page [\divxlc]+\][ \t]*\n[\f\s]*(RFC [^\n]*\d{4}[ \t]*\n)?\n*", "\n\n", text)
    return text.replace("\f", "")


# ---- Licences -----------------------------------------------------------------------------

LICENCE = re.compile(r"copyright|licen[cs]e|spdx-|warrant(y|ies)|all rights reserved|redistribut", re.IGNORECASE)
FIRST_LINES = re.compile(r"(#![^\n]*\n|<\?(php|xml)[^\n]*\n|[^\n]*-\*-[^\n]*-\*-[^\n]*\n|\s*\n)*")
BLANK_LINES = re.compile(r"(\s*\n)?")
COMMENT = re.compile(
    r"[ \t]*/\*.*?\*/[ \t]*\n?|[ \t]*\(\*.*?\*\)[ \t]*\n?|[ \t]*\{-.*?-\}[ \t]*\n?|[ \t]*<!--.*?-->[ \t]*\n?"
    r'|[ \t]*(?P<quotes>"""|\'\'\').*?(?P=quotes)[ \t]*\n?'
    + "".join(rf"|(?:[ \t]*{mark}[^\n]*\n)+" for mark in
              (r"#(?!include|define|if|pragma|!)", "//", ";", "--", "%", "!", r"\.\.(?= )", "@c(?:omment)?(?= )", "dnl ",
               "[cC*](?= )", r"\\(?= )")),
    re.DOTALL)


def without_licence(text):
    """The text without those of its first comments that speak of a licence or of copyright."""
    at = FIRST_LINES.match(text).end()
    for _ in range(FIRST_COMMENTS):
        comment = COMMENT.match(text, at)
        if not comment:
            break
        end = BLANK_LINES.match(text, comment.end()).end()
        if LICENCE.search(comment.group()):
            text = text[:at] + text[end:]
        else:
            at = end
    return text


# ---- What is left out ---------------------------------------------------------------------

GENERATED = re.compile(
    r"\bauto(matically)?[- ]?generated\b|@generated|\bgenerated (by|from|automatically|using|with|code|file)\b"
    r"|\b(do not|don't) (edit|modify|change) (this|by hand|manually|directly)|\bdo not edit\b|this file was generated"
    r"|machine[- ]generated|\bcreated by (doxygen|autoconf|automake|bison|flex)\b", re.IGNORECASE)
LETTERS = bytes(range(65, 91)) + bytes(range(97, 123)) + bytes(range(128, 256))
DIGITS = b"0123456789"


def fault(text):
    """Why a text is left out, or None. The share of letters and digits, and how far zlib compresses it, tell tables
    and encoded data from text."""
    data = text.encode()
    if len(data) < MIN_BYTES:
        return "short"
    if len(data) > MAX_BYTES:
        return "long"
    if GENERATED.search(text, 0, 2_000):
        return "generated"
    if "\ufffd" in text:
        return "not text"
    visible = len(data.translate(None, b" \t\n"))
    letters = len(data) - len(data.translate(None, LETTERS))
    digits = len(data) - len(data.translate(None, DIGITS))
    if letters < 0.45 * visible or digits > 0.2 * visible:
        return "table"
    if len(data) > 1_000 * (1 + data.count(b"\n")):
        return "long lines"
    sample = data[:262_144]
    ratio = len(zlib.compress(sample, 1)) / len(sample)
    if ratio < 0.1:
        return "repetitive"
    if ratio > 0.7:
        return "encoded"
    return None


def decode(data):
    """The text of a file, or None where it is not UTF-8 or not text."""
    if b"\0" in data[:65536]:
        return None
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return None


def code_text(path, text):
    """A file of a source package as a document: without markup where it has one, without its licence."""
    extension = path.rsplit(".", 1)[-1].lower()
    if extension in ("ts", "xml") and text.lstrip().startswith("<"):
        return ""  # Qt's catalogues of translations
    return clean(MARKUP.get(extension, without_licence)(text))
