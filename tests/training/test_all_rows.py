"""One file that mixes conversations as people have them, through `regenerate` and `train`."""

import json
import re
import shutil

import pytest
from lilicorr.cli import app
from lilicorr.training.data import load_examples
from lilicorr.training.rows import read_jsonl
from lilicorr.training.tally import Tally
from transformers import AutoTokenizer
from typer.testing import CliRunner

TEMPLATE = (
    "{% for tool in tools or [] %}{{ 'w49 : ' + tool.function.name + ' </s> ' }}{% endfor %}"
    "{% for m in messages %}{{ m.role + ' : ' + m.content }}"
    "{% for call in m.tool_calls or [] %}{% set f = call.function %}"
    "{{ ' w48 ' + f.name + ' ' + f.arguments.x }}{% endfor %}"
    "{{ ' </s> ' }}{% endfor %}{% if add_generation_prompt %}{{ 'assistant : ' }}{% endif %}"
)
TOOLS = [{"type": "function", "function": {"name": "w45", "parameters": {}}}]
CALL = {"function": {"name": "w45", "arguments": '{"x": "w46"}'}}


def said(role, content, **more):
    return {"role": role, "content": content, **more}


def shared(*pairs):
    return [{"from": name, "value": value} for name, value in pairs]


USED = {
    "plain": {"messages": [said("user", "w1"), said("assistant", "w2 w3")]},
    "developer": {"messages": [said("developer", "w9"), said("user", "w1"), said("assistant", "w2 w3")]},
    "call": {"tools": TOOLS, "messages": [said("user", "w1"), said("assistant", None, tool_calls=[CALL])]},
    "result": {
        "tools": json.dumps(TOOLS),
        "messages": [
            said("user", "w1"), said("assistant", None, tool_calls=[CALL]), said("tool", "w7"),
            said("assistant", "w2 w3"),
        ],
    },
    "chatgpt": {"conversations": shared(("human", "w1"), ("chatgpt", "w2 w3"))},
    "bing": {"conversations": shared(("user", "w1"), ("bing", "w2 w3"), ("user", "w4"), ("bard", "w5 w6"))},
    "function": {
        "conversations": shared(
            ("system", "w9"), ("human", "w1"), ("function_call", '{"name": "w45", "arguments": {"x": "w46"}}'),
            ("observation", "w7"), ("gpt", "w2 w3"),
        )
    },
    "parts": {"messages": [said("user", [{"type": "text", "text": "w1"}, {"type": "text", "text": "w4"}]),
                           said("assistant", [{"type": "text", "text": "w2 w3"}])]},
}  # fmt: skip
NAMELESS = {"messages": [said("user", "w8 w8"), said("assistant", "w2 w3")]}
ODD = {
    "a part of type 'image_url'": {
        "id": "image",
        "messages": [said("user", [{"type": "image_url", "image_url": "x"}])],
    },
    "a message of role 'critic'": {"id": "critic", "messages": [said("critic", "w1"), said("user", "w1")]},
    "a message that is no text": {"id": "null", "messages": [said("user", None), said("assistant", "w2 w3")]},
    "no user message": {"id": "alone", "messages": [said("assistant", "w2 w3")]},
    "not JSON": '{"id": "torn", "messa',
    "not a JSON object": "[1]",
}


@pytest.fixture
def tool_target(ending_target, tmp_path):
    """A target whose template prints tools, calls and results."""
    folder = tmp_path / "target"
    shutil.copytree(ending_target, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return str(folder)


def lines():
    rows = [{"id": name, **row} for name, row in USED.items()] + [NAMELESS]
    return [json.dumps(row) for row in rows] + [
        row if isinstance(row, str) else json.dumps(row) for row in ODD.values()
    ]


@pytest.fixture(params=["lines", "array"])
def mixed(request, tmp_path):
    """The same rows as JSONL, and, but for what is no row, as a `.json` file that is one array."""
    if request.param == "lines":
        path = tmp_path / "mixed.jsonl"
        path.write_text("\n".join(lines()))
    else:
        path = tmp_path / "mixed.json"
        path.write_text(json.dumps([json.loads(line) for line in lines() if "torn" not in line], indent=1))
    return path


def run(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def reasons(output, what):
    """Counts by reason, as printed."""
    found = re.findall(rf"{what}: ([^:]*?): (\d+) \(the first: ", output.replace("\n", " "))
    return {reason: int(count) for reason, count in found}


def test_a_file_that_mixes_all_kinds_of_rows_is_answered_and_trained_on(
    mixed, tool_target, tmp_path, make_settings, write_recipe
):
    answers, data = tmp_path / "answers.jsonl", tmp_path / "run"
    options = ["--target", tool_target, "--max-new-tokens", 30, "--dtype", "float32"]
    result = run("regenerate", mixed, "--output", answers, *options)
    assert result.exit_code == 0, result.output
    odd = [reason for reason in ODD if mixed.suffix == ".jsonl" or reason != "not JSON"]
    assert reasons(result.output, "left out") == dict.fromkeys(odd, 1)
    rows = {row["id"]: row for row in read_jsonl(answers)}
    (nameless,) = rows.keys() - USED.keys()
    assert USED.keys() < rows.keys() and len(nameless) == 16
    assert sum(len(row["prompt_hashes"]) for row in rows.values()) == 10  # `bing` has two answers
    again = run("regenerate", mixed, "--output", answers, *options)
    assert again.exit_code == 0 and "0 answers in 0 rows added" in again.output.replace("\n", " ")

    settings = make_settings(data, target=tool_target, steps=2, batch_size=2)
    recipe = write_recipe(tmp_path / "r.yaml", settings)
    common = ["--target", tool_target, "--output"]
    result = run("train", recipe, "--data", answers, *common, data)
    assert result.exit_code == 0, result.output
    said_ids = [ids for row in rows.values() for ids in [*row.get("earlier_output_ids", []), row["output_ids"]]]
    short = sum(len(ids) < 2 for ids in said_ids)
    brief = {"an answer with fewer than the two tokens that a block needs": short} if short else {}
    assert reasons(result.output, "left out") == brief  # every other answer is trained on

    result = run("train", recipe, "--data", mixed, *common, tmp_path / "direct")  # as if this target had said it all
    assert result.exit_code == 0, result.output
    expected = dict.fromkeys([*odd, "a row that does not end with an answer"], 1)
    del expected["no user message"]
    assert reasons(result.output, "left out") == expected


def test_results_of_tools_are_context_and_a_last_call_is_made_anew(tool_target, tmp_path):
    path, output = tmp_path / "p.jsonl", tmp_path / "o.jsonl"
    path.write_text("".join(json.dumps({"id": name, **USED[name]}) + "\n" for name in ("call", "result", "function")))
    assert run("regenerate", path, "--output", output, "--target", tool_target, "--dtype", "float32").exit_code == 0
    rows = {row["id"]: row for row in read_jsonl(output)}
    assert [message["role"] for message in rows["call"]["messages"]] == ["user", "assistant"]
    assert rows["call"]["tools"] == TOOLS
    for name in ("result", "function"):
        *_, call, result, answer = rows[name]["messages"]
        assert (call["weight"], result["content"]) == (0, "w7") and "weight" not in answer
        assert call["tool_calls"][0]["function"] == {"name": "w45", "arguments": {"x": "w46"}}
        assert result["tool_call_id"] == call["tool_calls"][0]["id"]
    tokenizer = AutoTokenizer.from_pretrained(tool_target)
    examples = {example.id: example for example in load_examples([output], tokenizer, 200)}
    for name, row in rows.items():
        if len(row["output_ids"]) > 1:
            mine = examples[name]
            assert sum(mine.loss_mask) == len(row["output_ids"])
            text = tokenizer.decode(mine.input_ids)
            assert ("w48 w45 w46" in text) == (name != "call") and ("w49 : w45" in text) == (name != "function")


@pytest.mark.parametrize("finished", [True, False])
def test_a_call_that_the_target_made_is_supervised(tool_target, tmp_path, finished):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"id": "call", **USED["call"], "finished": finished}))
    tokenizer = AutoTokenizer.from_pretrained(tool_target)
    (example,) = load_examples([path], tokenizer, 64)
    supervised = [token for token, on in zip(example.input_ids, example.loss_mask, strict=True) if on]
    assert tokenizer.decode(supervised) == "w48 w45 w46" + (" </s>" if finished else "")


@pytest.mark.parametrize("verb", ["regenerate", "train"])
def test_strict_stops_at_the_first_odd_row(tool_target, tmp_path, make_settings, write_recipe, verb):
    path, output = tmp_path / "p.jsonl", tmp_path / "out"
    path.write_text("\n".join([*lines()[:2], '{"id": "torn', *lines()[2:4]]))
    recipe = write_recipe(tmp_path / "r.yaml", make_settings(output, target=tool_target, steps=1, batch_size=2))
    first = [path] if verb == "regenerate" else [recipe, "--data", path]
    result = run(verb, *first, "--output", output, "--target", tool_target, "--strict")
    assert result.exit_code == 1 and isinstance(result.exception, SystemExit)
    assert "p.jsonl line 3 is not valid JSON" in result.output.replace("\n", " ")
    assert not (tmp_path / "out" / "checkpoint").exists() and not (tmp_path / "out").is_file()


def test_a_template_without_tools_leaves_calls_out_and_reads_developers_as_system(target_folder, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"id": name, **USED[name]}) + "\n" for name in ("call", "result", "developer")))
    tally = Tally()
    tokenizer = AutoTokenizer.from_pretrained(target_folder)
    tokenizer.chat_template = "{{ messages[0].role == 'system' and 'w30 ' or 'w31 ' }}" + tokenizer.chat_template
    (example,) = load_examples([path], tokenizer, 64, tally=tally)
    assert tally.counts == {"the chat template knows no tool calls": 3}  # two calls, and an answer behind one
    assert example.id == "developer" and tokenizer.decode(example.input_ids).startswith("w30 ")


def test_a_row_whose_template_refuses_it_is_left_out_and_named(target_folder, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"id": name, **USED[name]}) + "\n" for name in ("plain", "bing")))
    tokenizer, tally = AutoTokenizer.from_pretrained(target_folder), Tally()
    tokenizer.chat_template = (
        "{% if messages | length > 3 %}{{ raise_exception('too long') }}{% endif %}" + tokenizer.chat_template
    )
    found = load_examples([path], tokenizer, 64, tally=tally)
    assert [example.id for example in found] == ["plain", "bing"] and sum(found[1].loss_mask) == 3
    assert tally.counts == {"the chat template refuses it": 1} and "row 'bing': " in tally.first


def test_rows_without_id_are_known_by_their_content(tmp_path, tool_target):
    path = tmp_path / "a.jsonl"
    path.write_text(
        "".join(json.dumps({"messages": [said("user", w), *NAMELESS["messages"][1:]]}) + "\n" for w in "xyx")
    )
    ids = [example.id for example in load_examples([path], AutoTokenizer.from_pretrained(tool_target), 64)]
    assert ids[0] == ids[2] != ids[1] and all(re.fullmatch(r"[0-9a-f]{16}", name) for name in ids)
