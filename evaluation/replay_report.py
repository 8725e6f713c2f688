"""What a replay found: acceptance lengths by set and drafter, their changes with intervals, rules, slots."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from .files import write_json, write_text
from .metrics import Trace, acceptance_by_slot, acceptance_length
from .paper_tables import NOTHING, markdown
from .replay import RULES
from .sets import TITLES, in_order
from .tree_report import tree_tables, tree_view

DRAFT = RULES[0]
RESAMPLES = 2000
MEANING = (
    "Acceptance length (τ) along known answers: tokens committed per verified block, the target's own "
    "token included, every block weighing the same. The average is the unweighted mean over sets; the best of a row in "
    "bold. Intervals hold 95 % of {resamples} resamplings of the answers within each set, the same for all drafters."
)

Rows = Sequence[Mapping[str, Any]]


def replay_report(settings: Mapping[str, Any], rows: Rows) -> dict[str, Any]:
    """Figures of all answers and of those that do not loop.

    Args:
        settings: of the run, with `drafters` by name, the first being what the others are compared with.
        rows: one an answer: `set`, `loops`, and by drafter its traces by rule (`drafters`).
    """
    kept = [row for row in rows if not row["loops"]]
    names = list(settings["drafters"])
    views = {"all": _view(rows, names)} | ({"without_loops": _view(kept, names)} if kept else {})
    return {
        "settings": dict(settings),
        "answers": len(rows),
        "looping_share": 1 - len(kept) / len(rows),
        "views": views,
    }


def _view(rows: Rows, names: Sequence[str]) -> dict[str, Any]:
    sets = {name: [row for row in rows if row["set"] == name] for name in in_order({row["set"] for row in rows})}
    lengths: dict[str, Any] = {}
    for drafter in names:
        lengths[drafter] = {}
        for rule in [rule for rule in RULES if rule in rows[0]["drafters"][drafter]]:
            by_set = {name: acceptance_length(_traces(part, drafter, rule)) for name, part in sets.items()}
            lengths[drafter][rule] = {"sets": by_set, "average": fmean(by_set.values())}
    return {
        "answers": {name: len(part) for name, part in sets.items()},
        "lengths": lengths,
        "by_slot": {name: acceptance_by_slot(_traces(rows, name, DRAFT)) for name in names},
        "change": {name: _change(list(sets.values()), name, names[0]) for name in names[1:]},
    } | tree_view(sets, {name: _walk(sets, name) for name in names})


def _traces(rows: Iterable[Mapping[str, Any]], drafter: str, rule: str) -> list[Trace]:
    return [Trace.from_json(row["drafters"][drafter][rule]) for row in rows]


def _walk(sets: Mapping[str, Rows], drafter: str) -> dict[str, float]:
    """Tokens a pass of the drafter's own draft, by set; passes outside blocks commit one."""
    made = {}
    for name, rows in sets.items():
        traces = _traces(rows, drafter, DRAFT)
        tokens = sum(trace.new_tokens - 1 for trace in traces)
        made[name] = tokens / (tokens - sum(trace.committed - trace.blocks for trace in traces))
    return made


def _change(sets: Sequence[Rows], name: str, base: str, seed: int = 0) -> dict[str, float]:
    """Relative change of the average acceptance length from `base`, with the bounds of its interval."""
    generator = np.random.default_rng(seed)
    averages = {drafter: np.zeros(RESAMPLES) for drafter in (name, base)}
    exact = dict.fromkeys(averages, 0.0)
    for rows in sets:
        drawn = generator.integers(len(rows), size=(RESAMPLES, len(rows)))
        for drafter in averages:
            counts = np.array([[t.committed, t.blocks] for t in _traces(rows, drafter, DRAFT)], dtype=float)
            committed, blocks = counts[drawn].sum(axis=1).T
            averages[drafter] += np.where(blocks > 0, committed / np.maximum(blocks, 1), 1.0)
            exact[drafter] += acceptance_length(_traces(rows, drafter, DRAFT))
    low, high = np.quantile(averages[name] / averages[base] - 1, [0.025, 0.975])
    return {"change": exact[name] / exact[base] - 1, "low": float(low), "high": float(high)}


def write_replay_report(folder: Path, report: dict[str, Any]) -> Path:
    """Write `report.json` and `report.md` into `folder`; returns the path of the latter.

    Raises:
        OSError: one cannot be written.
    """
    write_json(folder / "report.json", report)
    path = folder / "report.md"
    write_text(path, replay_markdown(report))
    return path


def replay_markdown(report: dict[str, Any]) -> str:
    """The report as Markdown."""
    settings = report["settings"]
    count = settings["num_assistant_tokens"]
    drafts = f"{count} tokens drafted at a time" if count else "whole blocks"
    head = (
        f"Target {settings['target']['source']}, {settings['dtype']}, {drafts}, {report['answers']} answers, of which "
        f"{report['looping_share']:.1%} loop (a 4-gram seen 8 times or more)."
    )
    parts = ["# Replay", head, MEANING.format(resamples=RESAMPLES)]
    for view, title in (("all", "All answers"), ("without_loops", "Without looping answers")):
        if view in report["views"] and (view == "all" or report["looping_share"]):
            parts += [f"## {title}", *_tables(report["views"][view])]
    return "\n\n".join(parts) + "\n"


def _tables(view: dict[str, Any]) -> list[str]:
    lengths, names = view["lengths"], list(view["lengths"])
    rows = []
    for name, count in view["answers"].items():
        rows.append([TITLES.get(name, name), str(count), *_best(lengths[d][DRAFT]["sets"][name] for d in names)])
    rows.append(["Average", "", *_best(lengths[d][DRAFT]["average"] for d in names)])
    tables = {"Acceptance length": markdown(["Set", "answers", *names], rows)}
    if len(names) > 1:
        tables[f"Change from `{names[0]}`"] = _changes(view, names)
    rules = [[name, *(_length(lengths[name].get(rule)) for rule in RULES)] for name in names]
    tables["Averages by rule: the drafter's own draft, and what other picks among its candidates get"] = markdown(
        ["Drafter", *RULES], rules
    )
    slots = max(map(len, view["by_slot"].values()))
    shares = [[n, *(f"{s:.3f}" for s in by), *[""] * (slots - len(by))] for n, by in view["by_slot"].items()]
    tables["Share of blocks accepted up to a slot"] = markdown(["Drafter", *map(str, range(1, slots + 1))], shares)
    return [f"### {title}\n\n{table}" for title, table in (tables | tree_tables(view)).items()]


def _changes(view: dict[str, Any], names: Sequence[str]) -> str:
    lengths, rows = view["lengths"], []
    for name in view["answers"]:
        base = lengths[names[0]][DRAFT]["sets"][name]
        rows.append(
            [TITLES.get(name, name), *(f"{lengths[d][DRAFT]['sets'][name] / base - 1:+.1%}" for d in names[1:])]
        )
    made = [view["change"][name] for name in names[1:]]
    rows.append(["Average", *(f"{each['change']:+.1%}" for each in made)])
    rows.append(["95 % interval", *(f"{each['low']:+.1%} … {each['high']:+.1%}" for each in made)])
    return markdown(["Set", *names[1:]], rows)


def _best(values: Iterable[float]) -> list[str]:
    known = list(values)
    best = max(known) if len(known) > 1 else None
    return [f"**{value:.3f}**" if value == best else f"{value:.3f}" for value in known]


def _length(figures: Mapping[str, Any] | None) -> str:
    return NOTHING if figures is None else f"{figures['average']:.3f}"
