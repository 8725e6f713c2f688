"""Draft lengths that follow the measured times, on a clock that the test owns."""

import copy
import pickle
import random

import pytest
import torch
from lilicorr.candidate_generator import lilicorr_generator
from lilicorr.candidate_generator.pace import Durations, KnownTimes, Pace, StepTimes

COSTLY = {0: 46, 1: 62, 2: 64, 3: 84, 4: 86, 5: 90, 6: 94, 7: 100}  # rows cost time
FLAT = {drafted: 50 for drafted in range(8)} | {0: 47}  # rows are free


DRAFT = 6.0  # of these, what drafting takes


class Steps:
    """Steps at given costs whose drafted tokens are accepted with the probability that the drafter gives them."""

    def __init__(self, costs, pace, sure=lambda: 0.5, slow=lambda size: 1.0, honest=1.0):
        self.costs, self.pace, self.sure, self.slow, self.honest = costs, pace, sure, slow, honest

    def step(self):
        """Tokens drafted, verified and accepted, and seconds."""
        drafted = self.pace.choose()
        believed = [self.sure() for _ in range(drafted)]
        verified = self.pace.cut(believed)
        accepted = 0
        while accepted < verified and random.random() < self.honest * believed[accepted]:
            accepted += 1
        draft = DRAFT * self.slow(drafted) * random.uniform(0.9, 1.1) if drafted else 0.0
        rest = (self.costs[verified] - (DRAFT if verified else 0)) * self.slow(verified) * random.uniform(0.9, 1.1)
        if drafted:
            self.pace.times.draft.add(drafted, draft)
        self.pace.times.rest.add(verified, rest)
        self.pace.note(verified, accepted, believed)
        return drafted, verified, accepted, draft + rest


def decode(costs, sure, tokens=4000, seed=0, honest=1.0):
    """Pace's tokens by those of plain decoding in the same time, and how often each length was drafted and verified."""
    random.seed(seed)
    times, drafts, verified, spent, made = StepTimes(), [0] * 8, [0] * 8, 0.0, 0
    while made < tokens:
        steps, length = Steps(costs, Pace(7, times), sure if callable(sure) else lambda: sure, honest=honest), 0
        while length < 200:
            drafted, checked, accepted, seconds = steps.step()
            drafts[drafted] += 1
            verified[checked] += 1
            spent += seconds
            length += accepted + 1
        made += length
    return made * costs[0] / spent, drafts, verified


@pytest.mark.parametrize("costs", [COSTLY, FLAT])
@pytest.mark.parametrize("chance", [0.1, 0.45, 0.7, 0.97])
def test_pace_comes_near_the_best_fixed_length(costs, chance):
    best = max(sum(chance**slot for slot in range(size + 1)) * costs[0] / costs[size] for size in range(8))
    assert decode(costs, chance)[0] > 0.9 * best


@pytest.mark.parametrize("honest", [1.0, 0.7])
def test_a_draft_ends_where_the_drafter_is_not_sure(honest):
    """Half of the tokens are nearly certain, half nearly never right; only knowing which makes drafting pay here."""
    costs = COSTLY | {0: 46, 1: 62, 2: 78}

    def sure():
        return random.choice((0.97, 0.03))

    speed, drafts, verified = decode(costs, sure, honest=honest)
    blind = max(sum((0.5 * honest) ** slot for slot in range(size + 1)) * costs[0] / costs[size] for size in range(8))
    assert speed > 1.03 * blind
    assert verified[0] > drafts[0] + 0.2 * sum(drafts)  # drafted, but not worth a look


def test_probabilities_that_promise_too_much_are_calibrated():
    random.seed(1)
    pace = Pace(3, StepTimes())
    steps = Steps(FLAT, pace, lambda: 0.9, honest=0.5)
    for _ in range(200):
        steps.step()
    assert pace._calibrated(0, 0.9) == pytest.approx(0.45, abs=0.12)
    assert 0 < pace._calibrated(0, 0.1) < 0.1


def test_what_was_not_verified_does_not_make_slots_look_better():
    """With only sure slots verified, acceptance of all would look like theirs and drafts would grow too long."""
    random.seed(2)
    times = StepTimes()
    steps = Steps(COSTLY, Pace(7, times), lambda: random.choice((0.95, 0.05)))
    for _ in range(600):
        steps.step()
    usual = times.usual[0]
    assert usual.accepted / usual.reached == pytest.approx(0.5, abs=0.12)


def test_times_of_a_bad_start_do_not_last():
    """First drafts on a cold machine took three times as long; the pace must not stay with plain steps for that."""
    random.seed(3)
    taken = []
    steps = Steps(COSTLY, Pace(7, StepTimes()), lambda: 0.7, slow=lambda size: 3 if len(taken) < 6 and size else 1)
    for _ in range(300):
        taken.append(steps.step()[0])
    assert sum(taken[6:40]) < 60
    assert sum(size > 0 for size in taken[100:]) > 150


def test_a_useless_drafter_is_mostly_left_out_and_a_perfect_one_drafts_whole_blocks():
    _, useless, _ = decode(COSTLY, 0.0)
    assert useless[0] > 0.6 * sum(useless)
    _, perfect, verified = decode(FLAT, 1.0)
    assert perfect[7] > 0.95 * sum(perfect) and verified[7] > 0.95 * sum(verified)


def test_a_drafter_that_only_believes_in_itself_is_found_out():
    speed, _, verified = decode(COSTLY, 0.95, honest=0.0)
    assert verified[0] > 0.6 * sum(verified) and speed > 0.85


def test_every_kind_of_step_is_timed_before_the_choice():
    random.seed(0)
    times = StepTimes()
    steps = Steps(COSTLY, Pace(7, times), lambda: 0.0)
    assert [steps.step()[:2] for _ in range(6)] == [(7, 7), (7, 7), (2, 2), (2, 2), (0, 0), (0, 0)]
    assert Pace(7, times).choose() in (0, 1)


def test_expected_seconds_lie_between_known_sizes():
    durations = Durations()
    with pytest.raises(ValueError, match="Nothing has been timed"):
        durations.expect(3)
    for size, seconds in ((0, 1.0), (4, 3.0), (4, 3.0), (4, 90.0)):
        durations.add(size, seconds)
    assert [durations.expect(size) for size in (0, 2, 4, 7)] == [1.0, 2.0, 3.0, 3.0]


def test_known_times_are_kept_by_target_and_left_behind_by_copies():
    known, target = KnownTimes(), torch.nn.Linear(1, 1)
    known.of(target).rest.add(0, 1.0)
    assert known.of(target).rest.count(0) == 1
    assert known.of(torch.nn.Linear(1, 1)).rest.count(0) == 0
    assert copy.deepcopy(known).of(target).rest.count(0) == 0
    assert pickle.loads(pickle.dumps(known)).of(target).rest.count(0) == 0


class Clock:
    """Advances at every look by what the last pass of the target cost."""

    def __init__(self, target, costs):
        self.now, self.costs = 1.0, costs
        target.register_forward_hook(lambda module, args, kwargs, out: self.advance(kwargs), with_kwargs=True)

    def advance(self, kwargs):
        self.now += self.costs.get(kwargs["input_ids"].shape[1] - 1, 1000)

    def perf_counter(self):
        return self.now


@pytest.fixture
def paced(monkeypatch, new_target, new_drafter):
    def build(costs, **drafter_settings):
        target = new_target("llama")
        drafter = new_drafter(target, "lilicorr", draft_lengths="adaptive", decoding="stock", **drafter_settings)
        monkeypatch.setattr(lilicorr_generator, "time", Clock(target, costs))
        return target, drafter

    return build


def test_drafts_behind_a_prompt_and_steps_without_room_for_one_time_none(paced, prompt):
    target, drafter = paced(COSTLY)
    ids = prompt(30)
    for _ in range(6):
        for new in (2, 3):  # each call drafts once at most, and then takes the whole prompt in
            target.generate(ids, max_new_tokens=new, do_sample=False, assistant_model=drafter)
    times = drafter.step_times.of(target)
    assert times.rest.count(1) and not times.draft.known
    plain = target.generate(ids, max_new_tokens=40, do_sample=False)
    assert torch.equal(target.generate(ids, max_new_tokens=40, do_sample=False, assistant_model=drafter), plain)


def test_a_plain_step_is_no_draft_that_saved_nothing():
    times = StepTimes()
    for size in (7, 7, 2, 2, 0, 0):
        times.rest.add(size, COSTLY[size])
    pace = Pace(7, times)
    pace.choose()
    assert pace.cut([0.01, 0.01]) == 0 and times.drafts == 1 and times.saved > 0
    saved = times.saved
    assert pace.cut([]) == 0 and (times.drafts, times.saved) == (1, saved)


def test_a_choice_without_a_timed_draft_is_made():
    times = StepTimes()
    for size in (7, 7, 2, 2, 0, 0):
        times.rest.add(size, COSTLY[size])
    assert Pace(7, times).choose() in range(8)


@pytest.mark.parametrize("perfect", [True, False])
def test_paced_output_is_plain_output(paced, teach, prompt, perfect):
    target, drafter = paced(COSTLY)
    ids = prompt(6)
    plain = target.generate(ids, max_new_tokens=120, do_sample=False)
    teach(drafter, plain[0], wrong_slots=() if perfect else (0,))
    out = target.generate(ids, max_new_tokens=120, do_sample=False, assistant_model=drafter)
    assert torch.equal(out, plain)
    figures = drafter.last_generation
    assert figures.committed == 120
    if perfect:
        assert figures.drafted_per_block[-2] == 7
    else:
        assert figures.plain_steps > 60
        assert sum(figures.drafted_per_block) < 120


def test_rows_of_plain_steps_reach_the_next_draft(paced, teach, prompt):
    """A drafter that missed rows would believe to be at another position, and `teach` would notice."""
    target, drafter = paced(COSTLY)
    ids = prompt(6)
    plain = target.generate(ids, max_new_tokens=100, do_sample=False)
    teach(drafter, plain[0], wrong_slots=(0,))
    cache = target.generate(
        ids, max_new_tokens=60, do_sample=False, assistant_model=drafter, return_dict_in_generate=True
    ).past_key_values
    attached = cache._lilicorr_context
    known = attached.cache.length + sum(states.shape[1] for states, _ in attached._waiting)
    assert known == attached.rows == cache.get_seq_length() - 1  # all but the last pass's row
    before = drafter.last_generation.plain_steps
    assert before > 10
    teach(drafter, plain[0])
    drafter.step_times = KnownTimes()
    target.generate(plain[:, :66], max_new_tokens=34, do_sample=False, assistant_model=drafter, past_key_values=cache)
    assert drafter.last_generation.accepted_per_slot[0] == drafter.last_generation.blocks


@pytest.mark.parametrize(
    ("options", "longest"),
    [
        ({"num_assistant_tokens": 3}, 3),
        ({"num_assistant_tokens": 7}, 7),
        ({"num_assistant_tokens": 9}, 7),
        ({"do_sample": True}, 2),
        ({"do_sample": True, "num_assistant_tokens": 5}, 5),
        ({"do_sample": True, "num_assistant_tokens": 1}, 1),
    ],
)
def test_a_given_length_and_sampling_draft_alike_in_every_run(paced, prompt, options, longest):
    target, drafter = paced(COSTLY)
    target.generate(prompt(6), **({"max_new_tokens": 40, "do_sample": False, "assistant_model": drafter} | options))
    drafted = drafter.last_generation.drafted_per_block
    assert set(drafted[:-8]) == {longest}
    assert drafter.last_generation.plain_steps <= 2


def test_no_assistant_tokens_is_plain_decoding(paced, prompt):
    target, drafter = paced(COSTLY)
    plain = target.generate(prompt(6), max_new_tokens=12, do_sample=False)
    out = target.generate(
        prompt(6), max_new_tokens=12, do_sample=False, assistant_model=drafter, num_assistant_tokens=0
    )
    assert torch.equal(out, plain)
    assert drafter.last_generation.blocks == 0


def test_a_negative_length_is_refused(paced, prompt):
    target, drafter = paced(COSTLY)
    with pytest.raises(ValueError, match="num_assistant_tokens is -1"):
        target.generate(prompt(6), max_new_tokens=4, assistant_model=drafter, num_assistant_tokens=-1)


def test_the_call_can_ask_for_the_schedule_too(monkeypatch, new_target, new_drafter, teach, prompt):
    target = new_target("llama")
    drafter = new_drafter(target, "none", decoding="stock")
    monkeypatch.setattr(lilicorr_generator, "time", Clock(target, COSTLY))
    teach(drafter, [], wrong_slots=(0,))
    target.generate(
        prompt(6),
        max_new_tokens=80,
        do_sample=False,
        assistant_model=drafter,
        num_assistant_tokens_schedule="heuristic",
    )
    assert drafter.last_generation.plain_steps > 20
    assert max(drafter.last_generation.drafted_per_block) <= 7


def test_unknown_draft_lengths_is_refused(new_target, new_drafter):
    with pytest.raises(ValueError, match="draft_lengths is 'often'"):
        new_drafter(new_target("llama"), "none", draft_lengths="often")
