"""How many tokens to draft next and how many of them to verify, so that the text grows fastest.

Where the target checks eight tokens in the time of one, whole blocks are best. On a CPU without matrix units it does
not; there short drafts are, or none for a while, or a draft that ends where the drafter itself is not sure. Learnt from
what past steps took and kept; nothing of this touches what the target accepts.
"""

import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

KEEP_DRAFTED, KEEP_PLAIN = 0.95, 0.9  # of what is known about acceptance, what a step with and without draft leaves
REMEMBERED = 8  # steps of one kind whose times count
LONG = 0.998  # the same, over texts
RETRY = 16  # plain steps in a row after which a short draft is tried: a stale time or opinion must not last
TRUST = 0.55  # acceptance expected of slot 1 before anything is known
PRIOR = 6.0  # how many slots of late what has been known for long weighs
SHORT = 2  # tokens of a short draft: three rows take a CPU little longer than one, more of them do
SURE = 4.0  # how many slots the drafter's own probabilities weigh before anything is known


class Durations:
    """Seconds of something by its size. Only the latest count, since a busy host or a hot core changes them all."""

    def __init__(self) -> None:
        self._seconds: dict[int, deque[float]] = {}

    def add(self, size: int, seconds: float) -> None:
        """Note one."""
        self._seconds.setdefault(size, deque(maxlen=REMEMBERED)).append(seconds)

    def count(self, size: int) -> int:
        """How many of a size are remembered."""
        return len(self._seconds.get(size, ()))

    @property
    def known(self) -> bool:
        """Whether anything has been noted."""
        return bool(self._seconds)

    def expect(self, size: int) -> float:
        """Seconds of a size, or read off the line between the nearest known ones.

        Of the remembered times the lower quartile, which first and disturbed ones do not move.

        Raises:
            ValueError: if nothing has been noted.
        """
        if not self._seconds:
            raise ValueError("Nothing has been timed yet; add a time first.")
        below = max((known for known in self._seconds if known <= size), default=None)
        above = min((known for known in self._seconds if known >= size), default=None)
        if below is None or above is None or below == above:
            nearest = above if below is None else below
            assert nearest is not None
            return self._typical(nearest)
        low, high = self._typical(below), self._typical(above)
        return low + (high - low) * (size - below) / (above - below)

    def _typical(self, size: int) -> float:
        ordered = sorted(self._seconds[size])
        return ordered[len(ordered) // 4]


@dataclass
class Tally:
    """How a slot fared whenever all slots before it were accepted, slowly forgetting.

    Attributes:
        reached: how often that was; accepted: how often it was accepted then.
        expected: how often the drafter's probabilities said it would be.
    """

    reached: float = 0.0
    accepted: float = 0.0
    expected: float = 0.0

    def fade(self, keep: float) -> None:
        """Leave `keep` of everything."""
        self.reached *= keep
        self.accepted *= keep
        self.expected *= keep

    def add(self, accepted: float, expected: float) -> None:
        """Note one more."""
        self.reached += 1
        self.accepted += accepted
        self.expected += expected


class StepTimes:
    """What one drafter's steps with one target take, and how its drafts usually fare; shared by their calls.

    Attributes:
        draft: seconds by slots drafted; rest: of a step without its draft, by tokens verified (0: a plain one).
        usual: of each slot over all calls.
        saved: tokens' worth of time that drafts of late saved by verifying less of them; drafts: how many those are.
    """

    def __init__(self) -> None:
        self.draft, self.rest = Durations(), Durations()
        self.usual: list[Tally] = []
        self.saved = self.drafts = 0.0


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
        times.usual += [Tally() for _ in range(slots - len(times.usual))]
        self._recent = [Tally() for _ in range(slots)]
        self._plain = 0  # plain steps in a row
        self._probing = False  # whether the step is to be timed as it was chosen

    def choose(self) -> int:
        """Tokens to draft next, `0 … slots`: the most tokens a second, once each kind of step has been timed."""
        times, short = self.times, min(SHORT, self.slots)
        untimed = [size for size in (self.slots, short, 0) if times.rest.count(size) < 2]
        self._probing = bool(untimed) or self._plain >= RETRY
        if self._probing:
            return untimed[0] if untimed else short
        saved = times.saved / (times.drafts + 1)
        tokens, run, best, fastest = 1.0, 1.0, 0, 1.0 / times.rest.expect(0)
        for size, chance in enumerate(self._chances(), 1):
            run *= chance
            tokens += run  # expected: the target's own token and every accepted one
            drafting = times.draft.expect(size) if times.draft.known else 0.0  # short answers may have timed no draft
            rate = (tokens + saved) / (drafting + times.rest.expect(size))
            if rate > fastest:
                best, fastest = size, rate
        return best

    def cut(self, probabilities: Sequence[float]) -> int:
        """How many of the drafted tokens to verify, given the probability that the drafter gives each: early stop only.

        As many as gain most over what plain steps would say in the time of verifying them.
        """
        times, drafted = self.times, len(probabilities)
        if self._probing or not drafted:
            return drafted
        rate = 1.0 / times.rest.expect(0)
        tokens, run, gains = 1.0, 1.0, [0.0]
        for slot, probability in enumerate(probabilities):
            run *= self._calibrated(slot, probability)
            tokens += run
            gains.append(tokens - rate * times.rest.expect(slot + 1))
        best = max(range(drafted + 1), key=lambda size: (gains[size], size))
        times.saved = LONG * times.saved + gains[best] - gains[drafted]
        times.drafts = LONG * times.drafts + 1
        return best

    def note(self, verified: int, accepted: int, probabilities: Sequence[float] = ()) -> None:
        """Learn from a step of whose draft (`probabilities` as for `cut`) `verified` tokens were checked."""
        self._plain = 0 if probabilities or verified else self._plain + 1
        for tally in self._recent:
            tally.fade(KEEP_DRAFTED if probabilities else KEEP_PLAIN)
        for slot in range(min(len(probabilities), accepted + 1)):
            probability = probabilities[slot]
            # A slot that was left out fared as was expected of it: if only likely ones counted, all would look so.
            right = float(slot < accepted) if slot < verified else self._calibrated(slot, probability)
            self._recent[slot].add(right, probability)
            self.times.usual[slot].fade(LONG)
            self.times.usual[slot].add(right, probability)

    def _calibrated(self, slot: int, probability: float) -> float:
        """`probability` by how often the slot was accepted where such were given."""
        usual, recent = self.times.usual[slot], self._recent[slot]
        known = (usual.accepted + SURE) / (usual.expected + SURE)
        return min(1.0, probability * (recent.accepted + PRIOR * known) / (recent.expected + PRIOR))

    def _chances(self) -> list[float]:
        """Acceptance of each slot after the one before it was accepted; a slot never reached follows its neighbour.

        What is known of this text fades with every step, plain ones too, towards what earlier texts have shown.
        """
        chances, known = [], TRUST
        for usual, recent in zip(self.times.usual, self._recent, strict=False):
            known = (usual.accepted + 2 * known) / (usual.reached + 2)
            chances.append((recent.accepted + PRIOR * known) / (recent.reached + PRIOR))
        return chances
