"""`report.json`, `report.md` and its plots: what an evaluation found, made anew from finished rows at any time."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from .files import write_json, write_text
from .names import PROMPT_LOOKUPS, suffix_of
from .paper_tables import (
    LENGTH,
    RATE,
    SPEED_UP,
    against_table,
    arms_in,
    grid,
    markdown,
    panel,
    rules_table,
    seeds_table,
)
from .plots import draw_plots
from .summary import POOLINGS

MEANING = (
    "Acceptance length (τ): tokens committed per verified block, the target's own token included, every block weighing "
    "the same. Tokens/s: new tokens by the wall clock of `generate`, prefill included. Medians over seeds; the average "
    "is the unweighted mean over benchmarks; the best of a row in bold."
)
_POOLED = {
    "acceptance_length": "by blocks",
    "mean_of_response_means": "mean of the answers' own (z-lab)",
    "tokens_per_verification": "tokens by verifications, prefill's included (SGLang)",
}


def write_report(folder: Path, report: dict[str, Any], poolings: bool = False) -> Path:
    """Write `report.json`, the plots and `report.md` into `folder`; returns the path of `report.md`.

    Args:
        report: from `run.report_of`; poolings: also list acceptance lengths as other evaluators pool them.

    Raises:
        OSError: one cannot be written.
    """
    write_json(folder / "report.json", report)
    path = folder / "report.md"
    write_text(path, markdown_report(report, poolings, draw_plots(report, folder)))
    return path


def markdown_report(report: dict[str, Any], poolings: bool = False, plots: str = "") -> str:
    """The report as Markdown: head, tables of all answers, tables without looping ones, candidates, plots."""
    temperatures = report["temperatures"]
    parts = ["# Evaluation", _head(report), MEANING, _loops(temperatures), *_tables(temperatures, "all", poolings)]
    if any(views["looping_share"] for views in temperatures.values()):
        parts += ["## Without looping outputs"]
        kept = {name: views for name, views in temperatures.items() if views["without_loops"]["total"]["answers"]}
        parts += _tables(kept, "without_loops", poolings) if kept else ["Every answer loops."]
    parts += _candidates(report["coverage"])
    if plots:
        parts += ["## Plots", plots]
    return "\n\n".join(part for part in parts if part) + "\n"


def _head(report: dict[str, Any]) -> str:
    settings, plan = report["settings"], report["settings"]["plan"]
    seeds = ", ".join(map(str, plan["seeds"]))
    text = (
        f"Target {settings['target']['source']}, {settings['dtype']}, {report['questions']} questions, at most "
        f"{plan['max_new_tokens']} new tokens, batch of one; {plan['greedy_runs']} greedy run(s), seeds {seeds} when "
        f"sampling. {', '.join(f'{name} {value}' for name, value in settings['machine'].items())}."
    )
    if report["left_out"]:
        reason = next(iter(report["left_out"].values()))
        text += f" Left out or cut short: {len(report['left_out'])} questions (the first one: {reason})."
    return text


def _loops(temperatures: dict[str, Any]) -> str:
    shares = "; ".join(f"{panel(name)}: {views['looping_share']:.1%}" for name, views in temperatures.items())
    return f"Looping answers (a 4-gram seen 8 times or more in some arm's answer), which flatter drafters: {shares}."


def _tables(temperatures: dict[str, Any], view: str, poolings: bool) -> list[str]:
    """Headed tables of one view of the answers."""
    arms = [name for name in arms_in(temperatures) if name not in PROMPT_LOOKUPS]
    drafters = list(dict.fromkeys(name.removesuffix(suffix_of(name)) for name in arms))
    base = "none" if "none" in drafters else next(iter(drafters), "")
    tables = {
        "Speed-up over plain decoding (Table 1)": grid(
            temperatures, view, "sets", "Benchmark", [SPEED_UP], plain=[RATE]
        ),
        "Acceptance length / tokens/s / speed-up (Table 5)": grid(
            temperatures, view, "sets", "Benchmark", [LENGTH, RATE, SPEED_UP]
        ),
        "Acceptance length / tokens/s by category (Table 7)": grid(
            temperatures, view, "categories", "Category", [LENGTH, RATE], average=False
        ),
        "Medians over runs, sample standard deviation in parentheses (Table 9)": seeds_table(temperatures, view),
        f"Acceptance length, change from `{base}` (as Table 12)": against_table(temperatures, view, base),
        "By tokens of the prompt, concurrency one (Table 13)": grid(
            temperatures,
            view,
            "prompt_lengths",
            "Prompt tokens",
            [LENGTH, RATE, SPEED_UP],
            plain=[RATE, SPEED_UP],
            average=False,
        ),
        "Where a pass spends its time (Table 3)": _by_arm(temperatures, view, _STAGES),
        "Equality with plain decoding, and loops": _by_arm(temperatures, view, _EQUALITY),
        "Blocks accepted up to a slot": _by_slot(temperatures, view),
    }
    if poolings:
        columns = {_POOLED[name]: _number(name, "{:.3f}") for name in POOLINGS}
        tables["Acceptance length by other poolings"] = _by_arm(temperatures, view, columns)
    return [f"### {title}\n\n{table}" for title, table in tables.items() if table]


def _number(key: str, form: str, inner: str = "") -> Callable[[dict[str, Any], str], str]:
    def text(figures: dict[str, Any], _: str) -> str:
        value = figures.get(key)
        value = value.get(inner) if inner and value is not None else value
        return "–" if value is None else form.format(value)

    return text


def _rest(figures: dict[str, Any], _: str) -> str:
    shares = figures.get("shares")
    return f"{1 - sum(shares.values()):.0%}" if shares else "–"


def _equal(figures: dict[str, Any], temperature: str) -> str:
    return f"{figures['equal']} of {figures['answers']}" if temperature == "0" else "–"


_STAGES = {
    "tokens a pass": _number("tokens_per_pass", "{:.2f}"),
    "drafted": _number("drafted_per_pass", "{:.2f}"),
    "drafting ms": _number("milliseconds_per_pass", "{:.2f}", "draft"),
    "verifying ms": _number("milliseconds_per_pass", "{:.2f}", "target"),
    "drafting share": _number("shares", "{:.0%}", "draft"),
    "verifying share": _number("shares", "{:.0%}", "target"),
    "rest": _rest,
}
_EQUALITY = {
    "answers": _number("answers", "{}"),
    "equal to plain": _equal,
    "largest logit gap": _number("largest_logit_gap", "{:.2g}"),
    "looping": _number("looping", "{}"),
}


def _by_arm(temperatures: dict[str, Any], view: str, columns: dict[str, Callable[[dict[str, Any], str], str]]) -> str:
    """One row a temperature and drafting arm, one column for each of `columns`."""
    rows = []
    for temperature, views in temperatures.items():
        arms = views[view]["total"]["arms"]
        for number, name in enumerate(name for name in arms_in(temperatures) if name in arms):
            cells = [column(arms[name], temperature) for column in columns.values()]
            rows.append([panel(temperature) if number == 0 else "", name, *cells])
    return markdown(["", "Arm", *columns], rows, text_columns=2)


def _by_slot(temperatures: dict[str, Any], view: str) -> str:
    rows = []
    for temperature, views in temperatures.items():
        for name, figures in views[view]["total"]["arms"].items():
            if shares := figures.get("acceptance_by_slot"):
                rows.append([f"{name}, T = {temperature}", *(f"{share:.2f}" for share in shares)])
    slots = max(map(len, rows), default=1) - 1
    padded = [[*row, *[""] * (slots + 1 - len(row))] for row in rows]
    return markdown(["Arm", *(f"slot {slot + 1}" for slot in range(slots))], padded) if rows else ""


def _candidates(coverage: dict[str, Any]) -> list[str]:
    """Coverage of every drafter, and Table 12."""
    known = {name: part["all"] for name, part in coverage.items() if part["all"]}
    if not known:
        return []
    parts = ["## Candidates", "On blocks drafted again behind sampled tokens of plain decoding's answers, not timed."]
    for name, counted in known.items():
        count = len(counted["mean"])
        shown = [rank for rank in range(1, count + 1) if rank & (rank - 1) == 0 or rank == count]
        slots = [(f"slot {slot + 1}", shares) for slot, shares in enumerate(counted["by_slot"])]
        rows = [
            [label, *(f"{shares[k - 1]:.1%}" for k in shown)] for label, shares in [*slots, ("mean", counted["mean"])]
        ]
        title = f"### Coverage of `{name}`, {counted['blocks']} blocks: the target's token among the top"
        parts.append(f"{title}\n\n{markdown(['', *(str(k) for k in shown)], rows)}")
    if table := rules_table(coverage):
        parts.append(f"### Acceptance length of the greedy walk and the exact path (Table 12)\n\n{table}")
    return parts
