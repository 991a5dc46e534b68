#!/usr/bin/python3
"""Draws what `sbtrain eval --reach --lengths ... --json FILE` measured: the share of the keys that each head reads.

    scripts/plot_reach.py reach.json                       # writes reach.png: a map of layers by heads for each length
    scripts/plot_reach.py reach.json --lengths 512,16384 -o reach.png

A map has the share of the keys in percent; a layer that never skips a key stays empty. The script needs matplotlib
(Debian and Ubuntu: apt-get install python3-matplotlib).
"""

import argparse
import json
import math
import sys
from pathlib import Path

from plotting import INK, PlotError, load_pyplot, save, set_title

NUMBERED = 16  # maps of up to this many heads have their shares written into them


def read(path):
    """The name of the run and its results, shortest length first."""
    try:
        record = json.loads(Path(path).read_text(encoding="utf-8"))
        results = sorted(record["reach"], key=lambda result: result["length"])
        for result in results:
            result["shares"] = shares_of(result)
    except OSError as error:
        raise PlotError(f"{path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise PlotError(f"{path}: no result of `sbtrain eval --reach`: {error!r}") from error
    if not results:
        raise PlotError(f"{path}: holds no length")
    return record["name"].removeprefix("lengths_"), results


def shares_of(result):
    """Percent by layer and head; NaN where no key is ever skipped."""
    return [[math.nan if share is None else 100 * share for share in layer["heads"]] for layer in result["layers"]]


def chosen(results, lengths):
    missing = sorted(set(lengths) - {result["length"] for result in results})
    if missing:
        raise PlotError(f"--lengths: the file has no length {missing[0]}")
    return [result for result in results if not lengths or result["length"] in lengths]


def draw_map(axes, result):
    shares = result["shares"]
    image = axes.imshow(shares, cmap="viridis", vmin=0, vmax=100, aspect="auto")
    if len(shares[0]) <= NUMBERED:
        for layer, heads in enumerate(shares):
            for head, share in enumerate(heads):
                if not math.isnan(share):
                    axes.text(head, layer, f"{share:.0f}", ha="center", va="center", fontsize=8,
                              color="white" if share < 55 else INK)
    axes.set_xlabel("head")
    axes.set_xticks(range(0, len(shares[0]), max(1, len(shares[0]) // NUMBERED)))
    axes.set_yticks(range(0, len(shares), max(1, len(shares) // 24)))
    set_title(axes, f"{result['length']} tokens: {100 * result['keys_read']:.1f}%")
    return image


def draw(name, results, output):
    plt = load_pyplot()
    layers, heads = len(results[0]["shares"]), len(results[0]["shares"][0])
    size = (1.5 + len(results) * (1.2 + 0.32 * min(heads, 32)), 1.6 + 0.3 * min(layers, 48))
    figure, all_axes = plt.subplots(1, len(results), figsize=size, squeeze=False, sharey=True, constrained_layout=True)
    for axes, result in zip(all_axes[0], results):
        image = draw_map(axes, result)
    all_axes[0][0].set_ylabel(f"layer of {name}")
    figure.colorbar(image, ax=list(all_axes[0]), label="keys read, %")
    save(figure, output)


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0],
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", metavar="JSON", help="result of `sbtrain eval --reach --json JSON`")
    parser.add_argument("--lengths", metavar="N,N,...", help="default: all of the file")
    parser.add_argument("-o", "--output", metavar="PNG", help="default: reach.png beside the file")
    return parser.parse_args()


def main():
    arguments = parse_arguments()
    try:
        lengths = [int(length) for length in arguments.lengths.split(",")] if arguments.lengths else []
        name, results = read(arguments.file)
        output = Path(arguments.output or Path(arguments.file).parent / "reach.png")
        draw(name, chosen(results, lengths), output)
    except (PlotError, ValueError) as error:
        sys.exit(f"plot_reach: {error}")
    print(output)


if __name__ == "__main__":
    main()
