#!/usr/bin/env python3
"""Finds includes, and links of libraries, that run against the order of the folders of src/.

    scripts/include_order.py [ROOT]

MAY_INCLUDE is that order. Exit status: 0 all follow it, 1 some do not, which it prints.
"""
import pathlib
import re
import sys

# The folders that each folder may include, itself aside. A folder includes only folders that stand above it here.
MAY_INCLUDE = {
    # Kernels see pointers and structs of parameters alone.
    'kernels': '',
    'core': 'kernels',
    'job': 'core',
    'ops': 'kernels core',
    'layers': 'ops core',
    'attention': 'layers ops core',
    'model': 'attention layers ops core',
    'optim': 'ops core',
    'parallel': 'model optim ops job core',
    'tokenizer': 'core',
    'text': 'tokenizer core',
    'data': 'text tokenizer core',
    'checkpoint': 'parallel model ops job core',
    'eval': 'data tokenizer attention job core',
    'train': 'eval checkpoint data tokenizer parallel optim model ops job core',
    # The command line and those who handle whole configurations know config/, and nobody else.
    'config': 'train checkpoint optim attention core',
    'serve': 'checkpoint parallel data tokenizer model attention ops core',
    'export': 'serve config train checkpoint parallel data tokenizer model attention ops core',
    'bench': 'serve config train eval checkpoint parallel data model attention ops job core',
    'cli': 'bench export serve config train eval checkpoint parallel data text tokenizer model attention ops job core',
}
SOURCES = {'.h', '.cpp', '.cu', '.cuh', '.in', '.inc'}
INCLUDE = re.compile(r'^\s*#\s*include\s*"([a-z_]+)/')
LIBRARY = re.compile(r'\bsbtrain_([a-z]+)\b')


def problem(folder, other):
    """Why `folder` must not include `other`; empty if it may."""
    if other == folder or other not in MAY_INCLUDE or other in MAY_INCLUDE[folder].split():
        return ''
    allowed = MAY_INCLUDE[folder].split()
    return f"{folder}/ may include {', '.join(allowed) if allowed else 'no other folder'}, and not {other}/"


def problems_of(root, path, folder):
    links = path.name == 'CMakeLists.txt'
    if not links and path.suffix not in SOURCES:
        return
    for number, line in enumerate(path.read_text(errors='replace').splitlines(), 1):
        others = LIBRARY.findall(line.split('#')[0]) if links else INCLUDE.findall(line)
        for other in others:
            if why := problem(folder, other):
                yield f"{path.relative_to(root)}:{number}: {line.strip()}: {why}"


def table_problems():
    order = list(MAY_INCLUDE)
    for folder, allowed in MAY_INCLUDE.items():
        for other in allowed.split():
            if order.index(other) > order.index(folder):
                yield f"MAY_INCLUDE: {folder} may include {other}, which does not stand above it"


def main():
    root = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).parent.parent).resolve()
    found = list(table_problems())
    folders = [root / 'kernels', *sorted(path for path in (root / 'src').iterdir() if path.is_dir())]
    for folder in folders:
        if folder.name not in MAY_INCLUDE:
            found.append(f"{folder.relative_to(root)}: MAY_INCLUDE has no such folder; say there what it may include")
            continue
        for path in sorted(folder.rglob('*')):
            if path.is_file():
                found.extend(problems_of(root, path, folder.name))
    print('\n'.join(found) if found else f"{len(folders)} folders include each other in order")
    return 1 if found else 0


if __name__ == '__main__':
    sys.exit(main())
