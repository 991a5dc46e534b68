#!/usr/bin/env python3
"""Core seconds that a build took, by folder and by object, from ninja's log.

    scripts/build_times.py [FOLDER] [--objects N] [--limit SECONDS]

FOLDER is the build folder (default: build/release). A compiler works on one core, so what ninja logs of an object is
core seconds, as long as the machine does nothing else and ccache (-DSBTRAIN_CCACHE=) keeps nothing. With --limit the
exit status is 1 if an object took longer.
"""
import argparse
import collections
import pathlib
import re
import sys


def seconds_of(log):
    """What each output took when it was made last."""
    outputs = {}
    for line in log.read_text().splitlines():
        fields = line.split('\t')
        if len(fields) == 5 and not fields[3].startswith('/'):  # a custom command is logged twice
            outputs[fields[3]] = (int(fields[1]) - int(fields[0])) / 1000
    return outputs


def folder_of(output):
    """The folder of the sources: src/train for src/train/CMakeFiles/sbtrain_train.dir/step.cpp.o."""
    path = pathlib.PurePath(re.sub(r'/?CMakeFiles/[^/]+\.dir', '', output))
    return str(path.parent)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('folder', nargs='?', default='build/release', type=pathlib.Path)
    parser.add_argument('--objects', type=int, default=20, metavar='N', help='how many objects to list (20)')
    parser.add_argument('--limit', type=float, metavar='SECONDS', help='the most that an object may take')
    arguments = parser.parse_args()
    log = arguments.folder / '.ninja_log'
    if not log.is_file():
        sys.exit(f'build_times: {log} does not exist: build with ninja first (cmake --preset release)')
    outputs = seconds_of(log)
    objects = {name: time for name, time in outputs.items() if name.endswith(('.o', '.gch'))}
    folders = collections.Counter()
    for name, time in outputs.items():
        folders[folder_of(name) if name in objects else 'linking, listing tests and generated files'] += time
    print(f'{sum(outputs.values()):8.1f} s in all, {len(objects)} objects\n')
    for folder, time in folders.most_common():
        print(f'{time:8.1f} s {folder}')
    print()
    slowest = sorted(objects.items(), key=lambda item: -item[1])
    for name, time in slowest[:arguments.objects]:
        print(f'{time:8.1f} s {name}')
    above = [name for name, time in slowest if arguments.limit and time > arguments.limit]
    if above:
        sys.exit(f'build_times: {len(above)} objects took longer than {arguments.limit:g} s')


if __name__ == '__main__':
    main()
