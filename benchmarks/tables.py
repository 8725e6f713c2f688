"""The tables of README and docs, made from `benchmarks/results`.

    python benchmarks/tables.py [--check]

A table stands between `<!-- table: NAME -->` and `<!-- end of table -->`.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated

import typer
from lilicorr.evaluation.files import write_text
from record import RESULTS, read_rows

ROOT = Path(__file__).parents[1]
PAGES = (ROOT / "README.md", ROOT / "docs" / "evaluate.md", ROOT / "docs" / "decoding.md")
MARKED = re.compile(r"(<!-- table: ([\w ]+) -->\n).*?(<!-- end of table -->)", re.DOTALL)
ARMS = {
    "plain": "plain `generate`",
    "prompt lookup 3": "`prompt_lookup_num_tokens=3`, without a drafter",
    "embedded, chain": "the drafter's chains in Transformers' own loop",
    "embedded": "**`assistant_model=drafter`**",
}


def main(
    check: Annotated[bool, typer.Option("--check", help="Change nothing; exit 1 if a table differs.")] = False,
) -> None:
    """Write every table anew."""
    made = {page: filled(page.read_text("utf-8")) for page in PAGES}
    stale = [page for page, text in made.items() if text != page.read_text("utf-8")]
    for page in stale:
        if not check:
            write_text(page, made[page])
        print(f"{page.relative_to(ROOT)} {'differs from its results' if check else 'written'}")
    raise SystemExit(1 if check and stale else 0)


def filled(text: str, folder: Path = RESULTS) -> str:
    """`text` with every marked table made from the results in `folder`.

    Raises:
        KeyError: there is no table of a marked name.
    """
    return MARKED.sub(lambda found: f"{found[1]}{TABLES[found[2]](folder)}{found[3]}", text)


def speeds(folder: Path) -> str:
    """Every arm over all answers of the end-to-end run."""
    rows = {row["arm"]: row for row in read_rows("end_to_end", folder) if row["set"] == "all"}
    lines = []
    for arm, name in ARMS.items():
        row, mark = rows[arm], "**" if "**" in name else ""
        figures = (f"{float(row['tokens_per_second']):.1f}", f"{float(row['to_plain']):.2f}×")
        passes = f"{float(row['tokens_per_pass']):.2f}"
        equal = "" if arm == "plain" else f"{row['equal']} of {row['answers']}"
        lines.append([name, *(f"{mark}{figure}{mark}" for figure in (*figures, passes)), equal])
    return markdown(["arm", "tok/s", "to plain", "tokens a pass", "equal to plain"], lines)


def passes(folder: Path) -> str:
    """What drafting and a pass of the target took in the end-to-end run."""
    rows = [row for row in read_rows("end_to_end", folder) if row["set"] == "all"]
    lines = [
        [ARMS[row["arm"]].strip("*"), f"{float(row['draft_ms']):.1f}", f"{float(row['target_ms']):.1f}"] for row in rows
    ]
    return markdown(["arm", "draft ms a pass", "target ms a pass"], lines)


def sets(folder: Path) -> str:
    """Tokens a pass and speed to plain by set."""
    rows = {(row["set"], row["arm"]): row for row in read_rows("end_to_end", folder)}
    names = dict.fromkeys(name for name, _ in rows if name != "all")
    arms = [arm for arm in ARMS if arm != "plain"]
    cells = [
        [
            name,
            *(
                f"{float(rows[name, arm]['tokens_per_pass']):.2f} ({float(rows[name, arm]['to_plain']):.2f}×)"
                for arm in arms
            ),
        ]
        for name in names
    ]
    return markdown(["set: tokens a pass (speed to plain)", *(ARMS[arm].strip("*") for arm in arms)], cells)


def few_rows(folder: Path) -> str:
    """What passes of several rows cost beside one row."""
    rows = read_rows("few_rows", folder)
    one = float(rows[0]["plain_ms"])
    cells = [
        [row["rows"], *(f"{float(row[kind]):.1f} ({float(row[kind]) / one:.2f}×)" for kind in ("plain_ms", "few_ms"))]
        for row in rows
    ]
    return markdown(["rows of a pass", "`x @ W.T`, ms", "`W @ x.T`, ms"], cells)


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table with its first column to the left and all others to the right."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


TABLES: dict[str, Callable[[Path], str]] = {"speeds": speeds, "passes": passes, "sets": sets, "few rows": few_rows}

if __name__ == "__main__":
    typer.run(main)
