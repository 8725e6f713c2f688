"""What the command line shows: one sentence for an error, a sign of life for every wait, on consoles of any encoding.

It imports neither torch nor transformers, so that a mistyped option is answered at once.
"""

import codecs
import io
import os
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

Item = TypeVar("Item")
OUT_OF_MEMORY = ("out of memory", "can't allocate memory")  # as torch says it, of a GPU and of a CPU
LINE_SECONDS = 10.0  # between the lines that stand for a bar where there is no terminal
PLAIN_SIGNS = str.maketrans(
    "✓✗×…·–—─━→⏎⇥⟦⟧≤µτ“”█▓▒░", "+xx..---->|>[]<ut''#%=:"
)  # one for one, so that columns stay straight


def _plainer(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    text = error.object[error.start : error.end].translate(PLAIN_SIGNS)
    return "".join(letter if letter.isascii() else "?" for letter in text), error.end


codecs.register_error("lilicorr-plainer", _plainer)


def print_in_any_encoding() -> None:
    """Have stdout and stderr print a plainer sign, or `?`, for what their encoding lacks (cp1252, gbk, ascii …)."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="lilicorr-plainer")


def as_text(arguments: Sequence[str]) -> list[str]:
    """`arguments` of a command line as text: bytes that the locale cannot read are read as UTF-8.

    Raises:
        ValueError: one is not UTF-8 either; tokenizers and reports need text.
    """
    read = []
    for argument in arguments:
        try:
            argument.encode("utf-8")
            read.append(argument)
        except UnicodeEncodeError:
            try:
                read.append(os.fsencode(argument).decode("utf-8"))
            except UnicodeError:
                shown = argument.encode("utf-8", "backslashreplace").decode("utf-8")
                raise ValueError(f"The argument {shown} is not UTF-8 text; give it in UTF-8.") from None
    return read


def said(error: Exception) -> str:
    """What went wrong in one sentence, with the file it went wrong with first."""
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}; give another path."
    return " ".join(str(error).split())


def stop(error: Exception | str, code: int = 1) -> typer.Exit:
    """Print one sentence on stderr; raise what this returns."""
    text = error if isinstance(error, str) else said(error)
    Console(stderr=True).print(text, style="red", markup=False, highlight=False, soft_wrap=True)
    return typer.Exit(code)


@contextmanager
def one_sentence() -> Iterator[None]:
    """Say an error that users can cause in one sentence and exit with 1; any other is ours and passes.

    Wrong names, values, files and folders are `ValueError`s and `OSError`s; too little memory is told by its text.
    """
    try:
        yield
    except (ValueError, OSError) as error:
        raise stop(error) from error
    except (MemoryError, RuntimeError) as error:
        if not (isinstance(error, MemoryError) or any(text in str(error) for text in OUT_OF_MEMORY)):
            raise
        raise stop(
            f"There is too little memory ({said(error) or 'Python has none left'}); use smaller models."
        ) from error


@contextmanager
def waiting(what: str, still: bool = False) -> Iterator[None]:
    """Show `what` and the time since while something lasts; one line at its start where there is no terminal.

    Args:
        still: only that line in a terminal too, for what draws a bar of its own.
    """
    console = Console(stderr=True)
    if still or not console.is_terminal:
        console.print(f"{what} …", markup=False, highlight=False, soft_wrap=True)
        yield
        return
    columns = (SpinnerColumn("line"), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        progress.add_task(what, total=None)
        yield


@contextmanager
def loading(what: str, *sources: object) -> Iterator[None]:
    """`waiting` while models are loaded; where one of `sources` is fetched, bars of Transformers and Hub show.

    Args:
        sources: folders or repositories that are loaded.
    """
    local = all(os.path.isdir(str(source)) for source in sources)
    with waiting(what, still=not local):
        if local:
            from transformers.utils.logging import disable_progress_bar

            disable_progress_bar()
        yield


@contextmanager
def counting(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar over `total` steps on stderr; where there is no terminal, lines at its start, now and then, at its end.

    Yields:
        What to call with the number of steps that are done since.
    """
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left:"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(what, total=total)
        printed = time.monotonic()

        def advance(steps: int) -> None:
            nonlocal printed
            progress.advance(task, steps)
            if not console.is_terminal and time.monotonic() - printed >= LINE_SECONDS:
                printed = time.monotonic()
                console.print(progress.get_renderable())

        if not console.is_terminal:
            console.print(progress.get_renderable())
        yield advance


def tracked(items: Collection[Item], what: str) -> Iterator[Item]:
    """`items` one by one, with the bar of `counting`."""
    with counting(what, len(items)) as advance:
        for item in items:
            yield item
            advance(1)
