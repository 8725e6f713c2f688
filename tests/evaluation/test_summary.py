import json
import math

import pytest
from lilicorr.evaluation.arms import Measured
from lilicorr.evaluation.metrics import Trace
from lilicorr.evaluation.names import ARMS, PLAIN, chosen_arms, named_folders
from lilicorr.evaluation.paper_tables import LENGTH, RATE, SPEED_UP, against_table, grid, rules_table, seeds_table
from lilicorr.evaluation.summary import Asked, arm_figures, by_temperature, condense, spread


def measured(accepted, seconds, stages=(0.0, 0.0, 0.0)):
    """An answer of blocks with these numbers of accepted drafts, one token from the prefill."""
    per_slot = tuple(sum(count > slot for count in accepted) for slot in range(4))
    new = 1 + sum(accepted) + len(accepted)
    names = dict(zip(("prefill", "draft", "target"), stages, strict=True))
    return Measured(new, seconds, False, Trace(len(accepted), per_slot, new, 4 * len(accepted)), names)


def plain(new, seconds, loops=False):
    return Measured(new, seconds, loops)


def asked(seed, fast, *, name="gsm8k", temperature=1.0, loops=False, category="math", tokens=10):
    arms = {PLAIN: plain(10, 10.0, loops), "a": measured([4, 0], 5.0 / fast), "b": measured([2, 0], 7.0)}
    return Asked(name, category, tokens, temperature, seed, arms)


def test_stage_shares_leave_the_prefill_out():
    figures = arm_figures([measured([4, 2], 10.0, (2.0, 2.0, 4.0))])
    assert figures["tokens_per_second"] == pytest.approx(0.9)
    assert figures["shares"] == pytest.approx({"draft": 0.25, "target": 0.5})
    assert figures["milliseconds_per_pass"] == pytest.approx({"draft": 1000, "target": 2000})
    assert figures["drafted_per_pass"] == 4 and figures["acceptance_length"] == 4


def test_passes_without_a_draft_count_as_passes():
    run = measured([4], 10.0, (0.0, 3.0, 6.0))
    more = Measured(run.new_tokens + 2, run.seconds, False, Trace(1, (1, 1, 1, 1), run.new_tokens + 2, 4), run.stages)
    assert arm_figures([more])["milliseconds_per_pass"] == pytest.approx({"draft": 1000, "target": 2000})


def test_a_block_that_ends_with_an_accepted_token_commits_no_other():
    trace = Trace(2, (2, 2, 1, 1), 8, 8, endings=1)  # the prompt's pass, blocks of 3 + 1 and of 3 accepted
    figures = arm_figures([Measured(8, 10.0, False, trace, {"prefill": 1.0, "draft": 3.0, "target": 6.0})])
    assert figures["acceptance_length"] == 3.5 and figures["tokens_per_pass"] == 3.5
    assert figures["milliseconds_per_pass"] == pytest.approx({"draft": 1500, "target": 3000})


def test_counted_passes_give_tokens_a_pass_without_a_drafter():
    runs = [Measured(9, 1.0, False, passes=4), Measured(5, 1.0, False, passes=4)]
    assert arm_figures(runs)["tokens_per_pass"] == 1.5
    assert "tokens_per_pass" not in arm_figures([Measured(9, 1.0, False)])


def test_an_arm_without_blocks_has_speed_only():
    figures = arm_figures([Measured(1, 0.5, False, Trace(0, (), 1, 0))])
    assert figures["tokens_per_second"] == 2 and "acceptance_length" not in figures


def test_measured_survives_json():
    run = Measured(3, 0.5, True, Trace(1, (1, 0), 3, 2), {"draft": 0.1}, False, 0.25)
    assert Measured.from_json(json.loads(json.dumps(run.to_json()))) == run
    assert Measured.from_json(json.loads(json.dumps(plain(3, 1.0).to_json()))) == plain(3, 1.0)


def test_spread_of_several_seeds():
    assert spread([3.0, 1.0, 2.0, 6.0]) == pytest.approx(
        {"runs": 4, "median": 2.5, "mean": 3.0, "sd": math.sqrt(14 / 3), "min": 1.0, "max": 6.0}
    )
    assert spread([5.0])["sd"] == 0 and spread([math.nan]) == {"runs": 0}


def test_speed_up_is_the_median_of_each_seeds_own():
    condensed = condense([asked(1, 1), asked(2, 2), asked(3, 4)])
    speed = condensed["arms"]["a"]["over_seeds"]["speed_up"]
    assert (speed["min"], speed["median"], speed["max"]) == pytest.approx((1.4, 2.8, 5.6))
    assert condensed["seeds"] == [1, 2, 3] and condensed["arms"][PLAIN]["over_seeds"]["speed_up"]["median"] == 1


def test_both_views_hold_the_same_turns_for_every_arm():
    part = by_temperature([asked(1, 1), asked(1, 2, loops=True), asked(1, 1, temperature=0.0)], ["gsm8k"])
    assert list(part) == ["0", "1"] and part["1"]["looping_share"] == 0.5 and part["0"]["looping_share"] == 0
    kept = part["1"]["without_loops"]["total"]
    assert kept["answers"] == 1 and {arm["answers"] for arm in kept["arms"].values()} == {1}
    only = by_temperature([asked(1, 1, loops=True)], ["gsm8k"])["1"]
    assert only["looping_share"] == 1 and only["without_loops"]["total"] == {"answers": 0, "seeds": [], "arms": {}}


def test_groups_by_category_and_prompt_length():
    rows = [asked(1, 1, tokens=129), asked(1, 1, tokens=128, category="code"), asked(1, 1, tokens=5000)]
    view = by_temperature(rows, ["gsm8k"])["1"]["all"]
    assert list(view["prompt_lengths"]) == ["1–128", "129–256", "2049 and more"]
    assert {name: part["answers"] for name, part in view["categories"].items()} == {"code": 1, "math": 2}


@pytest.fixture
def temperatures():
    rows = [asked(seed, seed, name=name) for seed in (1, 2, 3) for name in ("gsm8k", "mt-bench")]
    greedy = [asked(0, 2, name=name, temperature=0.0) for name in ("gsm8k", "mt-bench")]
    return by_temperature(rows + greedy, ["gsm8k", "mt-bench"])


def test_table_cells_are_medians_with_the_best_in_bold(temperatures):
    lines = grid(temperatures, "all", "sets", "Benchmark", [LENGTH, RATE, SPEED_UP], plain=[RATE]).splitlines()
    assert lines[0] == "|  | Benchmark | plain | a | b |"
    assert lines[2] == "| Greedy, T = 0 | GSM8K | 1.0 | **3.00** / **2.8** / **2.80×** | 2.00 / 0.7 / 0.71× |"
    assert lines[4].startswith("|  | Average | 1.0 | **3.00** / **2.8**")
    assert lines[5].startswith("| Sampling, T = 1 | GSM8K |") and len(lines) == 8


def test_an_arm_that_did_not_run_at_a_temperature_shows_a_dash(temperatures):
    for part in ("sets", "prompt_lengths", "categories"):
        for condensed in temperatures["1"]["all"][part].values():
            del condensed["arms"]["b"]
    text = grid(temperatures, "all", "sets", "Benchmark", [LENGTH])
    assert "|  | Average | **3.00** | – |" in text and "| Greedy, T = 0 | GSM8K | **3.00** | 2.00 |" in text
    assert "| – |" in against_table(temperatures, "all", "a")


def test_spread_table_needs_more_than_one_run(temperatures):
    text = seeds_table(temperatures, "all")
    assert "T = 0" not in text and "| Throughput, T = 1 | GSM8K | 2.8 (1.4) | 0.7 (0) |" in text
    assert seeds_table({"0": temperatures["0"]}, "all") == ""


def test_change_from_a_base(temperatures):
    text = against_table(temperatures, "all", "b")
    assert "| Greedy, T = 0 | GSM8K | 3.000 (+50.0%) |" in text


def test_table_12_compares_greedy_and_exact():
    def counted(greedy, exact):
        return {"blocks": 8, "greedy": greedy, "exact": exact}

    part = {"all": counted(2.0, 1.9), "sets": {"gsm8k": counted(2.0, 1.9), "aime25": counted(2.0, 2.2)}}
    none = {"all": counted(2.0, None), "sets": {}}
    lines = rules_table({"a": part, "none": none, "empty": {"all": None, "sets": {}}}).splitlines()
    assert lines[2] == "| a | GSM8K | 8 | **2.000** | 1.900 | -5.00% |"
    assert lines[3] == "|  | AIME 2025 | 8 | 2.000 | **2.200** | +10.00% |"
    assert lines[4] == "|  | Mean Δ |  |  |  | **+2.50%** |" and len(lines) == 5
    assert rules_table({"none": none}) == ""


def test_an_arm_is_compared_with_the_same_kind_of_the_base():
    def row(**lengths):
        arms = {PLAIN: plain(10, 10.0), "prompt lookup 3": plain(10, 5.0)}
        return Asked("gsm8k", "math", 10, 0.0, 0, arms | {name: measured(made, 1.0) for name, made in lengths.items()})

    asked = row(**{"none": [1], "none, chain": [0], "a": [2], "a, chain": [2]})
    text = against_table(by_temperature([asked], ["gsm8k"]), "all", "none")
    assert text.splitlines()[0] == "|  | Benchmark | a | a, chain |"
    assert "| 3.000 (+50.0%) | 3.000 (+200.0%) |" in text


@pytest.mark.parametrize(
    "text", ["folder", "=folder", "name=", "plain=folder", "prompt lookup 3=f", "a, chain=f", "a, without text=f"]
)
def test_drafters_are_named(text):
    with pytest.raises(ValueError, match="name=folder"):
        named_folders([text])


def test_arms_are_named_in_any_order_or_all_at_once():
    assert chosen_arms(["chain,tree", "prompt lookup 10"]) == ("tree", "chain", "prompt lookup 10")
    assert chosen_arms(["tree", "all"]) == ARMS
    for text in ("trees", "tree,,chain", ""):
        with pytest.raises(ValueError, match=r"There is no arm .* --arms takes tree, chain, tree without text, prompt"):
            chosen_arms([text])
