import json
import shutil

import pytest
import torch
from lilicorr.cli import app
from lilicorr.evaluation.arms import configured
from lilicorr.evaluation.compare import answer, decoding_options, encode
from lilicorr.evaluation.loading import load_pair
from lilicorr.evaluation.metrics import Trace
from lilicorr.evaluation.replay import RULES, Text, answers_in, drafts_along, walks
from lilicorr.evaluation.replay_report import replay_report
from lilicorr.modeling_lilicorr.lattice import Draft
from lilicorr.training.target import target_pass
from transformers import AutoTokenizer
from typer.testing import CliRunner


@pytest.fixture(scope="module")
def pair(tiny_folders):
    drafters = {name: tiny_folders / name for name in ("lilicorr", "none", "xpress")}
    return load_pair(tiny_folders / "target", drafters, dtype="fp32", device="cpu")


def along(pair, drafter, text, slots=None):
    target_hidden = target_pass(pair.target, torch.tensor([text.token_ids]), drafter.config.target_layer_ids)[0]
    return drafts_along(pair.target, drafter, text, target_hidden, slots)


def traces_of(pair, drafter, text, slots=None):
    return walks(text, along(pair, drafter, text, slots))


def known(pair, prompt, said, ended):
    start = prompt["input_ids"].shape[1]
    return Text([*prompt["input_ids"][0].tolist(), *said], start, start + len(said), ended)


@pytest.mark.parametrize("head", ["lilicorr", "none"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("count", [2, 3, 41])
@pytest.mark.parametrize("slots", [None, 2])
def test_replay_gives_the_figures_of_a_real_run(pair, head, temperature, count, slots):
    # With the sampled run's own answer: what it accepted is what foretold it.
    drafter, prompt = pair.drafters[head], encode(pair.tokenizer, "abc", pair.target.device)
    options = decoding_options(count, temperature) | {"min_new_tokens": count, "num_assistant_tokens": slots}
    with configured(drafter, {"decoding": "stock"}):
        run = answer(pair.target, prompt, drafter, seed=5, **options)
    assert traces_of(pair, drafter, known(pair, prompt, run.token_ids, ended=False), slots)["draft"] == run.trace


@pytest.mark.parametrize("head", ["lilicorr", "xpress"])
@pytest.mark.parametrize("slots", [None, 2])
def test_replay_drafts_what_a_real_draft_does_behind_every_token(pair, monkeypatch, head, slots):
    drafter, target = pair.drafters[head], pair.target
    text, drafted, real = Text(list(range(30, 50)), 4, 20, False), [], drafter.head.draft
    monkeypatch.setattr(
        drafter.head, "draft", lambda *given, **options: drafted.append(real(*given, **options)) or drafted[-1]
    )
    traces_of(pair, drafter, text, slots)
    (whole,) = drafted
    ids = torch.tensor([text.token_ids])
    target_hidden = target_pass(target, ids, drafter.config.target_layer_ids)[0]
    for row, p in enumerate(range(text.start, text.end - 1)):
        alone = drafter.draft(
            ids[0, p : p + 1], target_hidden[:, :p], torch.arange(p)[None], drafter.new_cache(),
            target.get_input_embeddings(), target.get_output_embeddings(), num_slots=slots,
        )  # fmt: skip
        assert whole.tokens[row].tolist() == alone.tokens[0].tolist()


def shares(trace):
    return [count for count in trace.accepted_per_slot if count]  # a real draft is cut behind the end that it foretells


def test_replay_counts_an_accepted_end_as_a_real_run_does(pair, monkeypatch):
    drafter = pair.drafters["none"]
    follows = torch.zeros(pair.target.config.vocab_size, dtype=torch.long)

    def foretell(block, return_lattice=False):
        tokens = [follows[block.anchor_ids]]
        for _ in range(block.hidden.shape[1] - 1):
            tokens.append(follows[tokens[-1]])
        drafted = torch.stack(tokens, dim=1)
        return Draft(drafted, torch.ones_like(drafted, dtype=torch.bool), lambda: torch.ones(drafted.shape))

    monkeypatch.setattr(drafter.head, "draft", foretell)
    accepted_ends = 0
    for text in ("abc", "hello", "x = 1", "3 + 4", "q", "zz top"):
        prompt = encode(pair.tokenizer, text, pair.target.device)
        whole = answer(pair.target, prompt, **decoding_options(30)).token_ids
        follows[list(whole[:-1])] = torch.tensor(whole[1:])
        for end in dict.fromkeys(whole[2:]):
            with configured(drafter, {"decoding": "stock"}):
                run = answer(pair.target, prompt, drafter, **decoding_options(60) | {"eos_token_id": end})
            if len(run.token_ids) > 1:
                trace = traces_of(pair, drafter, known(pair, prompt, run.token_ids, ended=True))["draft"]
                assert (trace.blocks, shares(trace)) == (run.trace.blocks, shares(run.trace))
                accepted_ends += drafter.last_generation.committed_per_block[-1] > 1
    assert accepted_ends > 3


def test_rules_are_ordered_and_a_head_without_scores_has_no_exact_path(pair):
    prompt = encode(pair.tokenizer, "hello", pair.target.device)
    text = known(pair, prompt, answer(pair.target, prompt, **decoding_options(40)).token_ids, ended=False)
    ours, none = (traces_of(pair, pair.drafters[name], text) for name in ("lilicorr", "none"))
    assert list(ours) == list(RULES) and list(none) == ["draft", "first candidates", "best path there is"]
    assert none["draft"] == none["first candidates"]
    for traces in (ours, none):
        # No pick of the candidates gets further than the right ones where they are.
        assert all(trace.blocks >= traces["best path there is"].blocks for trace in traces.values())


def test_answers_are_found_by_their_tokens():
    said = [False, True, True, False, True, True, True, False, True]
    first, second = answers_in(list(range(9)), said, {6})
    assert (first.start, first.end, first.ended) == (1, 3, False)
    assert (second.start, second.end, second.ended) == (4, 7, True)


def row(name, loops, **accepted):
    traces = {drafter: {"draft": vars(Trace(10, (count,), 20, 70))} for drafter, count in accepted.items()}
    return {"set": name, "loops": loops, "drafters": traces}


def test_report_pools_blocks_by_set_and_compares_with_the_first():
    rows = [row("b", False, a=2, c=4), row("b", False, a=4, c=6), row("a", True, a=10, c=10), row("a", False, a=5, c=5)]
    report = replay_report({"drafters": {"a": {}, "c": {}}}, rows)
    everything, kept = report["views"]["all"], report["views"]["without_loops"]
    assert report["looping_share"] == 0.25
    assert everything["lengths"]["a"]["draft"]["sets"] == pytest.approx({"a": 1.75, "b": 1.3})
    assert everything["lengths"]["c"]["draft"]["average"] == pytest.approx((1.75 + 1.5) / 2)
    assert kept["lengths"]["c"]["draft"]["sets"] == pytest.approx({"a": 1.5, "b": 1.5})
    change = everything["change"]["c"]
    assert change["change"] == pytest.approx(1.625 / 1.525 - 1)
    # Every answer is at least as long with c, so no resampling says otherwise.
    assert 0 < change["low"] <= change["change"] <= change["high"]


@pytest.fixture
def chatting(tiny_folders, tmp_path):
    folder = tmp_path / "models"
    shutil.copytree(tiny_folders, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder / "target")
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tokenizer.save_pretrained(folder / "target")
    return folder


@pytest.fixture
def answers(pair, tmp_path):
    folder = tmp_path / "answers"
    folder.mkdir()
    for name in ("gsm8k", "mine"):
        rows = []
        for i, prompt in enumerate(["abc", "hello there"]):
            inputs = encode(pair.tokenizer, prompt, pair.target.device)
            said = list(answer(pair.target, inputs, **decoding_options(12)).token_ids)
            messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": "?"}]
            rows.append({"id": str(i), "messages": messages, "output_ids": said, "finished": False})
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in rows))
    return folder


def assert_columns_fit(text):
    for table in text.split("\n\n"):
        if table.startswith("|"):
            assert len({line.count("|") for line in table.splitlines()}) == 1


def run(folders, answers, output, *more):
    arguments = ["replay", "--answers", answers, "--output", output, "--target", folders / "target"]
    named = [f"--drafter={name}={folders / name}" for name in ("none", "lilicorr")]
    return CliRunner().invoke(app, [str(each) for each in (*arguments, *named, "--dtype", "fp32", *more)])


def test_command_reports_and_resumes(chatting, answers, tmp_path):
    output = tmp_path / "replay"
    result = run(chatting, answers, output)
    assert result.exit_code == 0, result.output
    report = json.loads((output / "report.json").read_text())
    assert report["answers"] == 4 and list(report["views"]["all"]["answers"]) == ["gsm8k", "mine"]
    text = (output / "report.md").read_text()
    assert "| GSM8K | 2 |" in text and "95 % interval" in text
    assert "| Nodes | without text | with text | lookup alone |" in text and "| 63 |" in text
    assert_columns_fit(text)
    rows = (output / "rows.jsonl").read_text().splitlines(keepends=True)
    (output / "rows.jsonl").write_text("".join(rows[:3]) + rows[3][:20])  # killed while it wrote the third row
    assert run(chatting, answers, output).exit_code == 0
    assert (output / "rows.jsonl").read_text().splitlines(keepends=True) == rows
    assert json.loads((output / "report.json").read_text()) == report


def test_a_row_that_holds_too_little_is_named(chatting, answers, tmp_path):
    output = tmp_path / "replay"
    assert run(chatting, answers, output).exit_code == 0
    first, second, *others = (output / "rows.jsonl").read_text().splitlines(keepends=True)
    key = json.loads(second)["key"]
    (output / "rows.jsonl").write_text("".join([first, json.dumps({"key": key}) + "\n", *others]))
    result = run(chatting, answers, output)
    assert result.exit_code == 1 and key in " ".join(result.output.split()) and "remove it" in result.output


def test_trees_without_text_know_nothing_of_it(chatting, answers, tmp_path):
    result = run(chatting, answers, tmp_path / "out", "--nodes", "7, 3", "--no-lookup")
    assert result.exit_code == 0, result.output
    view = json.loads((tmp_path / "out" / "report.json").read_text())["views"]["all"]
    assert set(view["trees"]["none"]) == {"walk", "without text"} and list(view["trees"]["none"]["without text"]) == [
        "3",
        "7",
    ]
    assert "lookup" not in view and "suffixes" not in view
    text = (tmp_path / "out" / "report.md").read_text()
    assert "| Nodes | without text |\n" in text and "equal suffix" not in text
    result = run(chatting, answers, tmp_path / "out")
    assert result.exit_code == 1 and "other settings" in " ".join(result.output.split())


@pytest.mark.parametrize("more", [("--nodes", 0), ("--num-assistant-tokens", 2)])
def test_chains_alone(chatting, answers, tmp_path, more):
    result = run(chatting, answers, tmp_path / "out", *more)
    assert result.exit_code == 0, result.output
    assert "trees" not in json.loads((tmp_path / "out" / "report.json").read_text())["views"]["all"]


@pytest.mark.parametrize("more", [("--nodes", "7,x"), ("--nodes", "-3"), ("--nodes", 7, "--num-assistant-tokens", 2)])
def test_nodes_that_cannot_be_are_one_sentence(chatting, answers, tmp_path, more):
    result = run(chatting, answers, tmp_path / "out", *more)
    assert result.exit_code == 1 and isinstance(result.exception, SystemExit)
    assert "--nodes" in result.output and not (tmp_path / "out").exists()


@pytest.mark.parametrize("broken", ["nowhere", "empty", "twice", "torn"])
def test_wrong_answers_are_one_sentence(chatting, answers, tmp_path, broken):
    more = []
    if broken == "nowhere":
        answers = tmp_path / "no"
    elif broken == "empty":
        answers = tmp_path / "nothing"
        answers.mkdir()
    elif broken == "twice":
        more = ["--answers", answers / "mine.jsonl"]
    else:
        (answers / "mine.jsonl").write_text('{"id": "0", "mess')
    result = run(chatting, answers, tmp_path / "out", *more)
    assert result.exit_code == 1 and isinstance(result.exception, SystemExit)
    assert "Traceback" not in result.output and not (tmp_path / "out").exists()
