"""How many tokens to draft next, so that the text grows fastest: learnt from what past steps took and kept.

Where the target checks eight tokens in the time of one, whole blocks are best. On a CPU without matrix units it does
not; there short drafts, or none for a while, may be. Nothing of this touches what the target accepts.
"""

import weakref
from collections import deque
from statistics import median
from typing import Any

KEEP_DRAFTED, KEEP_PLAIN = 0.95, 0.9  # of what is known about acceptance, what a step with and without draft leaves
REMEMBERED = 31  # steps of one kind whose times count
FOLLOW = 0.2  # how fast the machine's speed is followed: a busy host or a hot core slows all kinds of steps alike
TRUST = 0.55  # acceptance expected of slot 1 before anything is known
PRIOR = 2.0  # how many observed slots that expectation weighs


class StepTimes:
    """What steps take by how much they draft, for one drafter and target; shared by their calls.

    Times are kept in units of the machine's momentary speed, so that kinds of steps compare that were seen far apart.
    """

    def __init__(self) -> None:
        self._times: dict[int, deque[float]] = {}
        self._unit = 0.0  # seconds of one unit at the machine's present speed

    def add(self, drafted: int, seconds: float) -> None:
        """Note a step that drafted and verified `drafted` tokens, 0 for a plain one."""
        if not self._unit:
            self._unit = seconds
        elif drafted in self._times:
            now = seconds / median(self._times[drafted])
            self._unit += FOLLOW * (min(max(now, self._unit / 2), 2 * self._unit) - self._unit)
        self._times.setdefault(drafted, deque(maxlen=REMEMBERED)).append(seconds / self._unit)

    def count(self, drafted: int) -> int:
        """How many such steps are remembered."""
        return len(self._times.get(drafted, ()))

    def expect(self, drafted: int) -> float:
        """Units of such a step: the median, or read off the line between the nearest known sizes.

        Raises:
            ValueError: if nothing has been noted.
        """
        if not self._times:
            raise ValueError("No step has been timed yet; add one first.")
        below = max((size for size in self._times if size <= drafted), default=None)
        above = min((size for size in self._times if size >= drafted), default=None)
        if below is None or above is None or below == above:
            nearest = above if below is None else below
            assert nearest is not None
            return median(self._times[nearest])
        low, high = median(self._times[below]), median(self._times[above])
        return low + (high - low) * (drafted - below) / (above - below)


class KnownTimes:
    """The `StepTimes` of one drafter with each target it has served; copies and pickles start anew."""

    def __init__(self) -> None:
        self._by_target: weakref.WeakKeyDictionary[Any, StepTimes] = weakref.WeakKeyDictionary()

    def of(self, target: Any) -> StepTimes:
        """What is known about steps with `target`."""
        return self._by_target.setdefault(target, StepTimes())

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(self), ()


class Pace:
    """Chooses the draft lengths of one `generate` call.

    Args:
        slots: the longest draft.
        times: what is known of step times; this call adds to it.
    """

    def __init__(self, slots: int, times: StepTimes) -> None:
        self.slots = slots
        self.times = times
        self._reached = [0.0] * slots  # forgetting counts: slot s was verified with all before it accepted
        self._accepted = [0.0] * slots

    def choose(self) -> int:
        """Tokens to draft next, `0 … slots`: the most tokens a second, once each kind of step has been timed."""
        for size in (self.slots, min(2, self.slots), 0):
            if self.times.count(size) < 2:
                return size
        tokens, run, best, fastest = 1.0, 1.0, 0, 1.0 / self.times.expect(0)
        for size, chance in enumerate(self._chances(), 1):
            run *= chance
            tokens += run  # expected: the target's own token and every accepted one
            rate = tokens / self.times.expect(size)
            if rate > fastest:
                best, fastest = size, rate
        return best

    def note(self, drafted: int, accepted: int, seconds: float | None) -> None:
        """Learn from a step; `seconds` is `None` where they would mislead, as with the prompt's work among them."""
        keep = KEEP_DRAFTED if drafted else KEEP_PLAIN
        self._reached = [keep * count for count in self._reached]
        self._accepted = [keep * count for count in self._accepted]
        for slot in range(min(drafted, accepted + 1)):
            self._reached[slot] += 1
            self._accepted[slot] += slot < accepted
        if seconds is not None:
            self.times.add(drafted, seconds)

    def _chances(self) -> list[float]:
        """Acceptance of each slot after the one before it was accepted; a slot never reached follows its neighbour.

        What is known fades with every step, plain ones too, so that drafting is tried again after a while.
        """
        chances, before = [], TRUST
        for reached, accepted in zip(self._reached, self._accepted, strict=True):
            before = (accepted + PRIOR * before) / (reached + PRIOR)
            chances.append(before)
        return chances
