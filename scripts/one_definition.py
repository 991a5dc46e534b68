#!/usr/bin/env python3
"""Finds classes of one name that two files define in one namespace.

    scripts/one_definition.py FOLDER...

The linker keeps one of the functions that the compiler makes for both, such as their destructors or those of a
vector of them, and it says nothing. Each file may be right alone, and the program frees what it never took.
Names within an unnamed namespace are free. Exit status: 0 none, 1 some, which it prints.
"""
import collections
import pathlib
import re
import sys

# Comments and literals, which may hold braces, and the lines of the preprocessor.
NO_CODE = [(r'//[^\n]*|/\*.*?\*/', ' '), (r'R"(\w*)\(.*?\)\1"', '""'), (r'"(?:\\.|[^"\\\n])*"', '""'),
           (r"'(?:\\.|[^'\\\n])+'", "' '"), (r'(?m)^[ \t]*#(?:\\\n|[^\n])*', ' ')]
NAMESPACE = re.compile(r'\bnamespace\s*([\w:]*)$')
CLASS = re.compile(r'\b(?:struct|class|union|enum(?:\s+class)?)\s+(\w+)(?:\s+final)?\s*(?::(?!:)[^;]*)?$')


def definitions(text):
    """The qualified names of the classes that a file defines outside of functions, classes and unnamed namespaces."""
    for pattern, replacement in NO_CODE:
        text = re.sub(pattern, replacement, text, flags=re.S)
    scopes = []  # the namespaces around, None for any other brace
    begin = 0
    for mark in re.finditer(r'[{};]', text):
        head = text[begin:mark.start()].strip()
        begin = mark.end()
        if mark.group() == '}' and scopes:
            scopes.pop()
        elif mark.group() == '{':
            namespace = NAMESPACE.search(head)
            found = None if namespace else CLASS.search(head)
            if found and all(scopes):  # '' is an unnamed namespace
                yield '::'.join([*scopes, found.group(1)])
            scopes.append(namespace.group(1) if namespace else None)


def main():
    files = collections.defaultdict(set)
    for folder in sys.argv[1:]:
        for path in pathlib.Path(folder).rglob('*'):
            if path.suffix in {'.h', '.cpp', '.cu', '.cuh'}:
                for name in definitions(path.read_text()):
                    files[name].add(str(path))
    twice = {name: sorted(paths) for name, paths in files.items() if len(paths) > 1}
    for name, paths in sorted(twice.items()):
        print(f"{name} is defined in {' and in '.join(paths)}: rename one, or put it into an unnamed namespace")
    return 1 if twice else 0


if __name__ == '__main__':
    sys.exit(main())
