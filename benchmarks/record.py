"""What a benchmark measured, as a CSV file in `benchmarks/results` from which tables are made."""

import csv
import io
import shlex
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lilicorr.evaluation.files import write_text

RESULTS = Path(__file__).parent / "results"


def about(machine: dict[str, Any]) -> dict[str, str]:
    """Machine, versions, commit and command of this run, the same in every row of its file."""
    script = Path(sys.argv[0]).name
    command = shlex.join(["python", f"benchmarks/{script}", *sys.argv[1:]])
    return {name: str(value) for name, value in machine.items()} | {"commit": _commit(), "command": command}


def _commit() -> str:
    try:
        found = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):  # no git, or no repository
        return "unknown"
    return found.stdout.strip()


def write_rows(path: Path, rows: Iterable[dict[str, Any]], run: dict[str, str]) -> None:
    """Write `rows`, which have the same keys, with what `about` says of their run."""
    whole = [{name: _text(value) for name, value in row.items()} | run for row in rows]
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(whole[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(whole)
    write_text(path, text.getvalue())


def read_rows(name: str, folder: Path = RESULTS) -> list[dict[str, str]]:
    """The rows of `folder/name.csv`."""
    with (folder / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _text(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else "" if value is None else str(value)
