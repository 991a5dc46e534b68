#!/usr/bin/python3
"""Draws the attention maps that `sbtrain eval --attention-maps FOLDER` wrote, as heat maps.

    scripts/plot_attention.py maps                          # writes maps/attention.png
    scripts/plot_attention.py maps --layers 0,3 --heads 1 -o map.png --title "Stick-breaking"

Rows are queries, columns are keys. If the file says what the true positions are (--task-example),
rings mark them. The script needs matplotlib and numpy (Debian and Ubuntu: apt-get install
python3-matplotlib).
"""

import argparse
import json
import sys
from pathlib import Path

from plotting import INK, PlotError, load_pyplot, save

LABELLED = 40  # texts of up to this many tokens are written beside the map


def read_maps(folder):
    path = folder / "maps.json"
    try:
        header = json.loads(path.read_text(encoding="utf-8"))
        return header, header["maps"], len(header["tokens"])
    except OSError as error:
        raise PlotError(f"{path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise PlotError(f"{path}: not written by `sbtrain eval --attention-maps`: {error!r}") from error


def chosen(text, what):
    if text is None:
        return None
    try:
        return {int(part) for part in text.split(",")}
    except ValueError as error:
        raise PlotError(f"--{what}: '{text}' is not a list of numbers") from error


def load(folder, item, tokens, numpy):
    path = folder / item["file"]
    values = numpy.fromfile(path, dtype="<f4")
    expected = tokens * tokens + (tokens if item["remainder"] else 0)
    if values.size != expected:
        raise PlotError(f"{path}: {values.size} numbers, not {expected}")
    return values[:tokens * tokens].reshape(tokens, tokens)


def draw(folder, arguments, output):
    plt = load_pyplot(font_size=8)
    import numpy  # matplotlib brings both
    from matplotlib.colors import PowerNorm
    from matplotlib.ticker import MaxNLocator

    header, maps, tokens = read_maps(folder)
    layers, heads = chosen(arguments.layers, "layers"), chosen(arguments.heads, "heads")
    maps = [m for m in maps if (layers is None or m["layer"] in layers)
            and (heads is None or m["head"] in heads)]
    if not maps:
        raise PlotError(f"{folder}: holds none of these layers and heads")
    rows = sorted({m["layer"] for m in maps})
    columns = sorted({m["head"] for m in maps})
    size = 5.0 if len(maps) == 1 else 2.8
    figure, grid = plt.subplots(len(rows), len(columns), squeeze=False, constrained_layout=True,
                                figsize=(1 + size * len(columns), 0.6 + size * len(rows)))
    for axes in grid.flat:
        axes.set_visible(False)
    image = None
    for item in maps:
        axes = grid[rows.index(item["layer"])][columns.index(item["head"])]
        axes.set_visible(True)
        # The square root of the scale shows small weights as well.
        image = axes.imshow(load(folder, item, tokens, numpy), cmap="Blues",
                            norm=PowerNorm(0.5, vmin=0, vmax=1), interpolation="nearest")
        positions = header.get("positions", [])
        if positions:
            side = 72 * size / tokens  # of a cell, in points; a ring has to leave its cell free
            axes.scatter([key for _, key in positions], [query for query, _ in positions],
                         s=max(5, 2 * side) ** 2, facecolors="none", edgecolors="#d1622b", linewidths=0.6)
        axes.set_title(f"layer {item['layer']}, head {item['head']}", fontsize=8)
        axes.tick_params(colors=INK, length=0, labelsize=6)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(4, integer=True))
        texts = header.get("texts", [])
        if len(maps) == 1 and len(texts) == tokens <= LABELLED:
            names = [repr(text)[1:-1] for text in texts]
            axes.set_xticks(range(tokens), names, rotation=90)
            axes.set_yticks(range(tokens), names)
    if arguments.title:
        figure.suptitle(arguments.title, fontsize=10)
    rings = "; rings: the answers" if header.get("positions") else ""
    figure.supxlabel(f"key (position in the text{rings})", fontsize=9)
    figure.supylabel("query", fontsize=9)
    figure.colorbar(image, ax=grid, shrink=0.6, label="weight")
    save(figure, output)


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0],
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="what --attention-maps was given")
    parser.add_argument("--layers", metavar="N,...", help="default: all")
    parser.add_argument("--heads", metavar="N,...", help="default: all")
    parser.add_argument("--title", help="default: none")
    parser.add_argument("-o", "--output", metavar="PNG", help="default: attention.png in the folder")
    return parser.parse_args()


def main():
    arguments = parse_arguments()
    output = Path(arguments.output or arguments.folder / "attention.png")
    try:
        draw(arguments.folder, arguments, output)
    except PlotError as error:
        sys.exit(f"plot_attention: {error}")
    print(output)


if __name__ == "__main__":
    main()
