"""How many tokens to draft next, so that the text grows fastest: learnt from what past steps took and kept.

Where the target checks eight tokens in the time of one, whole blocks are best. On a CPU without matrix units it does
not; there short drafts, or none for a while, may be. Nothing of this touches what the target accepts.
"""

import weakref
from collections import deque
from typing import Any

KEEP_DRAFTED, KEEP_PLAIN = 0.95, 0.9  # of what is known about acceptance, what a step with and without draft leaves
REMEMBERED = 8  # steps of one kind whose times count
LONG = 0.998  # the like, over texts
RETRY = 16  # plain steps in a row after which a short draft is tried: a stale time or opinion must not last
TRUST = 0.55  # acceptance expected of slot 1 before anything is known
PRIOR = 6.0  # how many slots of late what has been known for long weighs


class StepTimes:
    """Seconds that steps take by how much they draft, and how drafts usually fare, for one drafter and target.

    Shared by their calls. Only the latest steps of a kind count, since a busy host or a hot core changes them all.
    """

    def __init__(self) -> None:
        self._times: dict[int, deque[float]] = {}
        self.reached: list[float] = []  # of each slot over all calls, slowly forgetting, see `Pace`
        self.accepted: list[float] = []

    def add(self, drafted: int, seconds: float) -> None:
        """Note a step that drafted and verified `drafted` tokens, 0 for a plain one."""
        self._times.setdefault(drafted, deque(maxlen=REMEMBERED)).append(seconds)

    def count(self, drafted: int) -> int:
        """How many such steps are remembered."""
        return len(self._times.get(drafted, ()))

    def expect(self, drafted: int) -> float:
        """Seconds of such a step, or read off the line between the nearest known sizes.

        Of the remembered times the lower quartile, which first and disturbed steps do not move.

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
            return self._typical(nearest)
        low, high = self._typical(below), self._typical(above)
        return low + (high - low) * (drafted - below) / (above - below)

    def _typical(self, drafted: int) -> float:
        ordered = sorted(self._times[drafted])
        return ordered[len(ordered) // 4]


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
        missing = [0.0] * (slots - len(times.reached))
        times.reached, times.accepted = times.reached + missing, times.accepted + missing
        self._reached = [0.0] * slots  # forgetting counts: slot s was verified with all before it accepted
        self._accepted = [0.0] * slots
        self._plain = 0  # plain steps in a row

    def choose(self) -> int:
        """Tokens to draft next, `0 … slots`: the most tokens a second, once each kind of step has been timed."""
        for size in (self.slots, min(2, self.slots), 0):
            if self.times.count(size) < 2:
                return size
        if self._plain >= RETRY:
            return min(2, self.slots)
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
        self._plain = 0 if drafted else self._plain + 1
        keep = KEEP_DRAFTED if drafted else KEEP_PLAIN
        self._reached = [keep * count for count in self._reached]
        self._accepted = [keep * count for count in self._accepted]
        usual = self.times
        for slot in range(min(drafted, accepted + 1)):
            right = slot < accepted
            self._reached[slot] += 1
            self._accepted[slot] += right
            usual.reached[slot] = LONG * usual.reached[slot] + 1
            usual.accepted[slot] = LONG * usual.accepted[slot] + right
        if seconds is not None:
            self.times.add(drafted, seconds)

    def _chances(self) -> list[float]:
        """Acceptance of each slot after the one before it was accepted; a slot never reached follows its neighbour.

        What is known of this text fades with every step, plain ones too, towards what earlier texts have shown.
        """
        chances, usual = [], TRUST
        for slot in range(self.slots):
            usual = (self.times.accepted[slot] + 2 * usual) / (self.times.reached[slot] + 2)
            chances.append((self._accepted[slot] + PRIOR * usual) / (self._reached[slot] + PRIOR))
        return chances
