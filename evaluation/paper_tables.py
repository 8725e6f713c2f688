"""Tables of an evaluation in Markdown, laid out like those of the paper that its numbers are named after."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from .names import PLAIN, PROMPT_LOOKUPS, suffix_of
from .sets import TITLES

NOTHING = "–"
Figures = dict[str, Any]


@dataclass(frozen=True)
class Figure:
    """One number of a cell: its key among those spread over seeds, and how it is written."""

    key: str
    text: Callable[[float], str]


LENGTH = Figure("acceptance_length", "{:.2f}".format)
RATE = Figure("tokens_per_second", lambda rate: f"{rate:.0f}" if rate >= 100 else f"{rate:.1f}")
SPEED_UP = Figure("speed_up", "{:.2f}×".format)


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]], text_columns: int = 1) -> str:
    """A Markdown table; all but the first `text_columns` columns are set to the right."""
    rule = ["---"] * text_columns + ["---:"] * (len(header) - text_columns)
    lines = [header, rule, *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def median(figures: Figures | None, key: str) -> float | None:
    """The median over seeds of one figure of an arm, `None` where there is none."""
    return None if figures is None else figures["over_seeds"][key].get("median")


def arms_in(temperatures: dict[str, Any]) -> list[str]:
    """All arms but plain decoding, in their order."""
    names = (name for part in temperatures.values() for name in part["all"]["total"]["arms"])
    return [name for name in dict.fromkeys(names) if name != PLAIN]


def panel(temperature: str) -> str:
    """The paper's name of a temperature's part of a table."""
    return f"Greedy, T = {temperature}" if temperature == "0" else f"Sampling, T = {temperature}"


def grid(
    temperatures: dict[str, Any],
    view: str,
    part: str,
    label: str,
    figures: Sequence[Figure],
    *,
    plain: Sequence[Figure] = (),
    average: bool = True,
) -> str:
    """One row for every member of a part, one panel for every temperature, medians over seeds, the best in bold.

    Args:
        temperatures: of a report; view: `all` or `without_loops`; part: `sets`, `categories` or `prompt_lengths`.
        label: heads the column of the members' names; figures: what the cell of an arm holds.
        plain: what a column of plain decoding holds, none if empty; average: add the unweighted mean over the members.
    """
    names = arms_in(temperatures)
    rows = []
    for temperature, views in temperatures.items():
        members = {name: condensed["arms"] for name, condensed in views[view][part].items()}
        values = {
            name: {arm: {f.key: median(arms.get(arm), f.key) for f in (*figures, *plain)} for arm in (PLAIN, *names)}
            for name, arms in members.items()
        }
        if average and len(values) > 1:
            values["Average"] = _average(list(values.values()))
        for number, (name, by_arm) in enumerate(values.items()):
            cells = [panel(temperature) if number == 0 else "", TITLES.get(name, name)]
            cells += [_cell(by_arm[PLAIN], plain, {})] if plain else []
            best = {f.key: max((by_arm[arm][f.key] or 0.0 for arm in names), default=0.0) for f in figures}
            rows.append(cells + [_cell(by_arm[arm], figures, best if len(names) > 1 else {}) for arm in names])
    return markdown(["", label, *([PLAIN] if plain else []), *names], rows, text_columns=2)


def _average(members: list[dict[str, dict[str, float | None]]]) -> dict[str, dict[str, float | None]]:
    means: dict[str, dict[str, float | None]] = {}
    for arm, figures in members[0].items():
        means[arm] = {}
        for key in figures:
            known = [value for member in members if (value := member[arm][key]) is not None]
            means[arm][key] = fmean(known) if len(known) == len(members) else None
    return means


def _cell(values: dict[str, float | None], figures: Sequence[Figure], best: dict[str, float]) -> str:
    texts = []
    for figure in figures:
        value = values[figure.key]
        text = NOTHING if value is None else figure.text(value)
        texts.append(f"**{text}**" if value is not None and value == best.get(figure.key) else text)
    return NOTHING if all(text == NOTHING for text in texts) else " / ".join(texts)


def seeds_table(temperatures: dict[str, Any], view: str) -> str:
    """Table 9: median over seeds by set, sample standard deviation in parentheses; empty with one run each."""
    names = arms_in(temperatures)
    rows = []
    for temperature, views in temperatures.items():
        sets = views[view]["sets"]
        if max((len(condensed["seeds"]) for condensed in sets.values()), default=0) < 2:
            continue
        for title, figure in (("Acceptance length", LENGTH), ("Throughput", RATE), ("Speed-up", SPEED_UP)):
            for number, (name, condensed) in enumerate(sets.items()):
                label = f"{title}, T = {temperature}" if number == 0 else ""
                cells = [_spread(condensed["arms"].get(arm), figure) for arm in names]
                rows.append([label, TITLES.get(name, name), *cells])
    return markdown(["", "Benchmark", *names], rows, text_columns=2) if rows else ""


def _spread(figures: Figures | None, figure: Figure) -> str:
    value = median(figures, figure.key)
    if figures is None or value is None:
        return NOTHING
    return f"{figure.text(value)} ({figures['over_seeds'][figure.key]['sd']:.2g})"


def rules_table(coverage: dict[str, Any]) -> str:
    """Table 12: acceptance length of the greedy walk and of the exact path on the blocks that coverage was counted on.

    Empty without a head that scores pairs.
    """
    scored = {name: part["sets"] for name, part in coverage.items() if part["all"] and part["all"]["exact"] is not None}
    rows = []
    for name, sets in scored.items():
        changes = []
        for number, (set_name, counted) in enumerate(sets.items()):
            greedy, exact = counted["greedy"], counted["exact"]
            changes.append(exact / greedy - 1)
            lengths = [f"**{greedy:.3f}**" if greedy >= exact else f"{greedy:.3f}"]
            lengths += [f"**{exact:.3f}**" if exact >= greedy else f"{exact:.3f}"]
            label = name if number == 0 else ""
            rows.append(
                [label, TITLES.get(set_name, set_name), str(counted["blocks"]), *lengths, f"{changes[-1]:+.2%}"]
            )
        rows.append(["", "Mean Δ", "", "", "", f"**{fmean(changes):+.2%}**"])
    return markdown(["", "Benchmark", "blocks", "Greedy", "Exact", "Δ"], rows, text_columns=2) if rows else ""


def against_table(temperatures: dict[str, Any], view: str, base: str) -> str:
    """Acceptance length by set and its change from the drafter `base`, each arm against the base's of the same kind.

    Empty if there is no other drafter.
    """
    known = arms_in(temperatures)
    names = [name for name in known if name not in PROMPT_LOOKUPS and name.removesuffix(suffix_of(name)) != base]
    rows = []
    for temperature, views in temperatures.items():
        for number, (name, condensed) in enumerate(views[view]["sets"].items()):
            cells = []
            for arm in names:
                own = median(condensed["arms"].get(arm), LENGTH.key)
                against = median(condensed["arms"].get(base + suffix_of(arm)), LENGTH.key)
                cells.append(NOTHING if own is None or against is None else f"{own:.3f} ({own / against - 1:+.1%})")
            rows.append([panel(temperature) if number == 0 else "", TITLES.get(name, name), *cells])
    return markdown(["", "Benchmark", *names], rows, text_columns=2) if names else ""
