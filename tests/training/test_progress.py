import io
import threading

import pytest
from lilicorr.training import progress as progress_module
from lilicorr.training.progress import Bar, waiting
from rich.console import Console


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


def bar_at(clock, total=24_000, **options):
    return Bar(total, "rows", amounts="tokens", hidden=True, clock=clock, **options)


def test_bursts_count_every_row_and_the_rate_is_of_the_last_minute():
    clock = Clock()
    bar = bar_at(clock)
    assert bar.said() == "0 of 24,000 rows, 0:00:00 so far"
    for _ in range(4):  # a batch of 32 at a time, as answers come
        clock.now += 16
        for _ in range(32):
            bar.advance(1, 100)
    assert bar.said() == "128 of 24,000 rows, 200 tokens/s, 3:18:56 left"
    for _ in range(20):  # slower: what was faster before is forgotten
        clock.now += 32
        for _ in range(32):
            bar.advance(1, 100)
    assert bar.said() == "768 of 24,000 rows, 100 tokens/s, 6:27:12 left"
    clock.now += 300  # a batch longer than the minute still has a rate
    bar.advance(30, 300)
    assert ", 1 tokens/s, " in bar.said()


def test_what_was_done_before_is_no_rate():
    clock = Clock()
    bar = bar_at(clock, 100, done=60)
    clock.now += 10
    bar.advance(20, 5)
    assert bar.said() == "80 of 100 rows, 0.5 tokens/s, 0:00:10 left"
    assert Bar(3, "steps", hidden=True, clock=clock).said() == "0 of 3 steps, 0:00:00 so far"


@pytest.fixture
def piped(monkeypatch):
    """What is said on an stderr that is no terminal."""
    heard = io.StringIO()
    monkeypatch.setattr(progress_module, "Console", lambda **given: Console(file=heard, quiet=given["quiet"]))
    return heard


def test_without_a_terminal_there_is_a_plain_line_every_while(piped, monkeypatch):
    said = threading.Event()
    line = Bar.said
    monkeypatch.setattr(Bar, "said", lambda self: (said.set(), line(self))[1])
    with waiting("loading it"), Bar(5, "rows", pause=0.001) as bar:
        assert said.wait(60)  # while nothing moves, too
        bar.advance(2)
    first, *lines = piped.getvalue().splitlines()
    assert first.startswith("loading it") and lines[0].startswith("0 of 5 rows, 0:00:00 so far")
    assert lines[-1].startswith("2 of 5 rows, ")


def test_what_ends_the_work_is_said_on_a_line_of_its_own(piped):
    with pytest.raises(ValueError, match="over"), Bar(5, "rows"):
        raise ValueError("over")
    assert piped.getvalue().endswith("\n")


def test_a_hidden_bar_says_nothing(piped):
    with waiting("loading it", hidden=True), Bar(5, "rows", hidden=True, pause=0.001) as bar:
        bar.advance()
    assert piped.getvalue() == ""


def test_in_a_terminal_the_bar_moves_by_rows(monkeypatch):
    heard = io.StringIO()
    monkeypatch.setattr(
        progress_module,
        "Console",
        lambda **given: Console(file=heard, force_terminal=True, width=120, color_system=None),
    )
    with Bar(4, "rows") as bar:
        bar.advance(3)
    assert "3 of 4 rows, " in heard.getvalue()
