#!/usr/bin/python3
"""Draws which collective of a training step ran beside what, from `sbtrain bench train --gpus N --trace FILE`.

    sbtrain bench train --gpus 2 --config configs/1b_sb.yaml --trace step.json
    scripts/plot_overlap.py step.json -o step.png

The upper row of each panel is the stream that computes, the lower row the stream of the collectives, both of rank 0.
The first panel shows the whole step, the next ones the places named by --at, in milliseconds from the step's begin,
each --width milliseconds wide. Collectives and waits that are shorter than can be seen are drawn wider. The script needs matplotlib (Debian and Ubuntu: apt-get install python3-matplotlib).
"""

import argparse
import json
import sys
from pathlib import Path

from plotting import COLOURS, INK, PlotError, load_pyplot, save, set_title

# The parts of a step that `bench train` prints, and the collectives by name.
ORDER = ["matrix products", "attention", "element-wise", "loss", "optimizer", "communication",
         "all_gather", "reduce_scatter", "all_to_all", "all_reduce", "shift", "waits for keys"]  # fmt: skip
WAITS = ["communication", "waits for keys"]  # of the stream that computes
STREAMS = ["compute", "communication"]


def read(path):
    """[(stream, kind, begin, duration)] in milliseconds, counted from the first op of the stream that computes."""
    try:
        events = json.loads(Path(path).read_text(encoding="utf-8"))["traceEvents"]
        streams = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
        rows = []
        for event in events:
            if event["ph"] == "X":
                kind = event["name"] if event["cat"] == "collective" else event["cat"]
                rows.append((streams[event["tid"]], kind, event["ts"] / 1e3, event["dur"] / 1e3))
    except OSError as error:
        raise PlotError(f"{path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise PlotError(f"{path}: not a trace of sbtrain bench train ({error})") from error
    begins = [begin for stream, _, begin, _ in rows if stream == "compute"]
    if not begins:
        raise PlotError(f"{path}: holds no op")
    return [(stream, kind, begin - min(begins), duration) for stream, kind, begin, duration in rows]


def summary(rows):
    """Lines of text: how long the step took, and how much of the collectives' time the other stream waited for."""
    end = max(begin + duration for stream, _, begin, duration in rows if stream == "compute")
    lines = [f"step {end:.1f} ms"]
    for kind in ORDER:
        times = [duration for stream, each, _, duration in rows if each == kind and stream == "communication"]
        if times:
            lines.append(f"{kind}: {len(times)} calls, {sum(times):.1f} ms")
    waits = sum(duration for stream, kind, _, duration in rows if stream == "compute" and kind in WAITS)
    lines.append(f"the computing stream waits {waits:.1f} ms")
    return lines


def colour(kind):
    return COLOURS[ORDER.index(kind) % len(COLOURS)] if kind in ORDER else INK


def draw_panel(axes, rows, begin, end):
    """Bars of the rows. Collectives and waits have at least a width that can be seen in a plot of a whole step."""
    visible = (end - begin) / 600
    for stream, kind, start, duration in rows:
        if start < end and start + duration > begin:
            traffic = stream == "communication" or kind in WAITS
            axes.broken_barh([(start, max(duration, visible) if traffic else duration)],
                             (STREAMS[::-1].index(stream) - 0.4, 0.8), facecolors=colour(kind), linewidth=0,
                             zorder=3 if traffic else 2, antialiased=not traffic)
    axes.set_xlim(begin, end)
    axes.set_ylim(-0.5, 1.5)
    axes.set_yticks([1, 0], STREAMS)
    axes.tick_params(colors=INK, length=0, labelsize=9)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def draw(rows, places, width, title, output):
    plt = load_pyplot(9)
    from matplotlib.patches import Patch

    end = max(begin + duration for _, _, begin, duration in rows)
    figure, panels = plt.subplots(1 + len(places), 1, figsize=(10, 1.6 + 1.3 * (1 + len(places))), squeeze=False)
    draw_panel(panels[0][0], rows, 0, end)
    set_title(panels[0][0], title)
    for panel, place in zip(panels[1:], places):
        draw_panel(panel[0], rows, place, place + width)
    panels[-1][0].set_xlabel("milliseconds from the beginning of the step")
    kinds = [kind for kind in ORDER if any(row[1] == kind for row in rows)]
    names = {"communication": "waiting"}
    figure.legend(handles=[Patch(color=colour(kind), label=names.get(kind, kind)) for kind in kinds], loc="lower center",
                  ncol=5, frameon=False)
    figure.tight_layout(rect=(0, 0.09, 1, 1))
    save(figure, output)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("--at", default="", help="places of further panels, such as 100,400")
    parser.add_argument("--width", type=float, default=30, help="milliseconds of each of them")
    parser.add_argument("--title", default="One training step")
    parser.add_argument("-o", "--output", default="overlap.png")
    arguments = parser.parse_args()
    rows = read(arguments.file)
    print("\n".join(summary(rows)))
    try:
        places = [float(place) for place in arguments.at.split(",") if place]
    except ValueError as error:
        raise PlotError(f"--at: {error}") from error
    draw(rows, places, arguments.width, arguments.title, arguments.output)


if __name__ == "__main__":
    try:
        main()
    except PlotError as error:
        sys.exit(f"plot_overlap: {error}")
