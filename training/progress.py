"""Progress of long work: a bar in a terminal, a plain line every half minute elsewhere."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task
from rich.text import Text

WINDOW = 60.0  # seconds that a rate looks back
PAUSE = 30.0  # seconds between plain lines


@contextmanager
def waiting(text: str, hidden: bool = False) -> Iterator[None]:
    """Say on stderr what is being waited for, as long as it takes."""
    console = Console(stderr=True, quiet=hidden)
    if console.is_terminal:
        with console.status(text, spinner="dots" if console.encoding.startswith("utf") else "line"):
            yield
    else:
        console.print(f"{text} …" if console.encoding.startswith("utf") else text, markup=False, soft_wrap=True)
        yield


class Bar:
    """A bar over `total` of `unit`, with the rate of the last minute and the time that is left, on stderr.

    Use it as a context manager: it is off the screen before whatever ended it is said.

    Args:
        total: how many there are; unit: what they are; done: how many were done before.
        amounts: what else is counted, such as tokens; the rate is of these (of `unit` without).
        hidden: show nothing.
        clock: seconds; pause: between plain lines where stderr is no terminal.
    """

    def __init__(
        self,
        total: int,
        unit: str,
        done: int = 0,
        amounts: str = "",
        hidden: bool = False,
        clock: Callable[[], float] = time.monotonic,
        pause: float = PAUSE,
    ) -> None:
        self.total, self.unit, self.done, self.amounts = total, unit, done, amounts
        self.amount, self.note, self.clock, self.pause = 0.0, "", clock, pause
        self.began = clock()
        self._samples = deque([(self.began, done, 0.0)])
        self.console = Console(stderr=True, quiet=hidden)
        self._over = threading.Event()
        self._lines = threading.Thread(target=self._print_lines, daemon=True)
        self._bar = Progress(BarColumn(), _Said(self), console=self.console)
        self._task = self._bar.add_task("", total=total, completed=done)

    def advance(self, done: int = 1, amount: float = 0.0) -> None:
        """Count `done` more, and `amount` of what the rate is of."""
        self.done, self.amount = self.done + done, self.amount + amount
        now = self.clock()
        self._samples.append((now, self.done, self.amount))
        while len(self._samples) > 2 and self._samples[1][0] <= now - WINDOW:
            self._samples.popleft()  # one sample from before the minute stays: something slower still has a rate
        self._bar.update(self._task, completed=self.done)

    def said(self) -> str:
        """Such as `128 of 24,000 rows, 310 tokens/s, 1:02:03 left`."""
        (since, done, amount), (until, *_) = self._samples[0], self._samples[-1]
        parts = [f"{self.done:,} of {self.total:,} {self.unit}"]
        if until > since and self.done > done:
            rows = (self.done - done) / (until - since)
            rate = (self.amount - amount) / (until - since) if self.amounts else rows
            parts.append(
                f"{rate:,.0f} {self.amounts or self.unit}/s"
                if rate >= 10
                else f"{rate:.2g} {self.amounts or self.unit}/s"
            )
            parts.append(f"{timedelta(seconds=round((self.total - self.done) / rows))} left")
        else:
            parts.append(f"{timedelta(seconds=round(self.clock() - self.began))} so far")
        return ", ".join([*parts, self.note] if self.note else parts)

    def print(self, text: str) -> None:
        """Print a line that stays, above the bar."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def __enter__(self) -> "Bar":
        if self.console.is_terminal:
            self._bar.start()
        else:
            self._lines.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        if self.console.is_terminal:
            self._bar.stop()
        else:
            self._lines.join()
            self.print(self.said())

    def _print_lines(self) -> None:
        while not self._over.wait(self.pause):
            self.print(self.said())


class _Said(ProgressColumn):
    """What a `Bar` says, anew at each refresh."""

    def __init__(self, bar: Bar) -> None:
        super().__init__()
        self.bar = bar

    def render(self, task: Task) -> Text:
        return Text(self.bar.said())
