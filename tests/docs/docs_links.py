#!/usr/bin/env python3
"""Checks that every relative link of README.md, CONTRIBUTING.md and docs/ leads to a file, and to a heading where it
names one.

    docs_links.py ROOT
"""

import pathlib
import re
import sys


def without_code(text):
    """The text with empty lines in the place of code blocks, so that lines keep their numbers."""
    return re.sub(r"^```.*?^```", lambda block: "\n" * block.group(0).count("\n"), text, flags=re.S | re.M)


def anchor(heading):
    """What GitHub makes of a heading."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading.strip())
    return re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")


def anchors(page):
    found = {}
    for heading in re.findall(r"^#{1,6} +(.*)$", without_code(page.read_text()), flags=re.M):
        name = anchor(heading)
        count = found[name] = found.get(name, -1) + 1
        yield f"{name}-{count}" if count else name


def faults(root):
    pages = [root / "README.md", root / "CONTRIBUTING.md", *sorted(root.glob("docs/**/*.md"))]
    for page in pages:
        text = without_code(page.read_text())
        for link in re.finditer(r"\]\(([^)\s]+)\)", text):
            target = link.group(1)
            if re.match(r"[a-z]+:", target):
                continue
            place = f"{page.relative_to(root)}:{text.count(chr(10), 0, link.start()) + 1}: {target}"
            name, _, heading = target.partition("#")
            file = (page.parent / name).resolve() if name else page
            if not file.exists():
                yield f"{place}: there is no such file"
            elif heading and heading not in anchors(file):
                yield f"{place}: there is no such heading"


if __name__ == "__main__":
    found = list(faults(pathlib.Path(sys.argv[1])))
    print("\n".join(found), end="\n" if found else "")
    sys.exit(1 if found else 0)
