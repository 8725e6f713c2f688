"""Plots of an evaluation: bars by benchmark, acceptance by slot, coverage."""

import io
import os
import tempfile
from pathlib import Path
from typing import Any

from .paper_tables import LENGTH, SPEED_UP, arms_in, median, panel
from .sets import TITLES

NEEDED = "No plots: matplotlib is not installed (pip install 'lilicorr[eval]')."
_TITLES = {
    "speed_up": "Speed-up over plain decoding",
    "acceptance_length": "Acceptance length",
    "slots": "Share of blocks accepted up to a slot",
    "coverage": "Share of blocks whose token is among the candidates",
}


def draw_plots(report: dict[str, Any], folder: Path) -> str:
    """Draw what `report` has data for into `folder` as PNG files; returns Markdown that shows them (or why none).

    Raises:
        OSError: a file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        return NEEDED
    shown = []

    def keep(figure: Any, name: str) -> None:
        drawn = io.BytesIO()
        figure.savefig(drawn, format="png", dpi=110)
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
            file.write(drawn.getvalue())
        os.chmod(file.name, 0o644)
        os.replace(file.name, folder / f"{name}.png")
        shown.append(f"![{_TITLES[name]}]({name}.png)")

    temperatures = report["temperatures"]
    for key in (SPEED_UP.key, LENGTH.key):
        figure = Figure(figsize=(10, 3.2 * len(temperatures)), layout="constrained")
        for axes, (temperature, views) in zip(_column(figure, len(temperatures)), temperatures.items(), strict=True):
            _bars(axes, views["all"]["sets"], arms_in(temperatures), key)
            axes.set_title(f"{_TITLES[key]}, {panel(temperature)}")
        keep(figure, key)
    figure = Figure(figsize=(7, 3.2 * len(temperatures)), layout="constrained")
    for axes, (temperature, views) in zip(_column(figure, len(temperatures)), temperatures.items(), strict=True):
        axes.set(title=f"{_TITLES['slots']}, {panel(temperature)}", xlabel="slot")
        arms = views["all"]["total"]["arms"]
        _lines(axes, {name: arms[name].get("acceptance_by_slot", []) for name in arms})
    keep(figure, "slots")
    covered = {name: part["all"] for name, part in report["coverage"].items() if part["all"]}
    if covered:
        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.add_subplot(title=_TITLES["coverage"], xlabel="slot")
        curves = {}
        for name, counted in covered.items():
            for rank in sorted({1, len(counted["mean"])}):
                curves[f"{name}, top {rank}"] = [slot[rank - 1] for slot in counted["by_slot"]]
        _lines(axes, curves)
        keep(figure, "coverage")
    return "\n\n".join(shown)


def _column(figure: Any, count: int) -> list[Any]:
    return [figure.add_subplot(count, 1, number + 1) for number in range(count)]


def _bars(axes: Any, sets: dict[str, Any], names: list[str], key: str) -> None:
    """One group of bars a set, one bar an arm; lines show the range over seeds."""
    width = 0.8 / len(names)
    for number, name in enumerate(names):
        places, heights, below, above = [], [], [], []
        for place, condensed in enumerate(sets.values()):
            figures = condensed["arms"].get(name)
            height = median(figures, key)
            if figures is None or height is None:
                continue
            spread = figures["over_seeds"][key]
            places.append(place + (number - (len(names) - 1) / 2) * width)
            heights.append(height)
            below.append(height - spread["min"])
            above.append(spread["max"] - height)
        if places:
            axes.bar(places, heights, width, label=name, yerr=[below, above], error_kw={"elinewidth": 0.8})
    axes.axhline(1.0, color="grey", linewidth=0.8)
    axes.set_xticks(range(len(sets)), [TITLES.get(name, name) for name in sets])
    if axes.has_data() and axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize="small")


def _lines(axes: Any, curves: dict[str, list[float]]) -> None:
    for label, shares in curves.items():
        if shares:
            axes.plot(range(1, len(shares) + 1), shares, marker=".", label=label)
    axes.set_ylim(0, 1)
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize="small")
