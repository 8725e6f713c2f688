import json
import shutil
from pathlib import Path

import pytest
import torch
from lilicorr.cli import app
from lilicorr.training.chat import Chat
from lilicorr.training.decode import Decoding
from lilicorr.training.manifest import Manifest
from lilicorr.training.prompts import Source
from lilicorr.training.regenerate import regenerate
from lilicorr.training.rows import read_jsonl
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner


def run(
    target_folder, prompts, output, limit=0, max_turns=0, max_new_tokens=10, max_context=0, temperature=0.0, **changes
):
    decoding = Decoding(max_new_tokens, max_context, temperature)
    source = Source([str(prompts)], limit=limit, max_turns=max_turns)
    return regenerate(target_folder, source, str(output), decoding, **({"dtype": "float32"} | changes)).rows


def pair(folder):
    return AutoModelForCausalLM.from_pretrained(folder), Chat(AutoTokenizer.from_pretrained(folder))


def alone(model, chat, messages, tokens=10):
    prompt = torch.tensor([chat.prompt_ids(messages)])
    said = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=tokens, do_sample=False)
    return said[0, prompt.shape[1] :].tolist()


def test_answers_equal_plain_generate_prompt_by_prompt(target_folder, prompt_file, tmp_path):
    output = tmp_path / "answers.jsonl"
    assert run(target_folder, prompt_file, output, batch_size=5) == 12
    model, chat = pair(target_folder)
    rows = list(read_jsonl(output))
    assert {row["id"] for row in rows} == {f"p{i}" for i in range(12)}
    for row in rows:
        said = alone(model, chat, row["messages"][:-1])
        assert row["output_ids"] == said
        assert row["finished"] == (said[-1] == 2)
        assert row["messages"][-1]["role"] == "assistant" and row["domain"] == "chat"


def test_a_killed_run_resumes_without_repeats_and_drops_the_torn_line(target_folder, prompt_file, tmp_path):
    output = tmp_path / "answers.jsonl"
    assert run(target_folder, prompt_file, output, limit=4) == 4
    kept = output.read_text()
    with open(output, "a") as file:
        file.write('{"id": "p9", "mess')
    assert run(target_folder, prompt_file, output) == 8
    assert output.read_text().startswith(kept)
    assert sorted(row["id"] for row in read_jsonl(output)) == sorted(f"p{i}" for i in range(12))
    assert run(target_folder, prompt_file, output) == 0


def conversations(path, count=9):
    """Conversations of one to three user turns, some with what another model once answered."""
    rows = []
    for i in range(count):
        messages = [{"role": "system", "content": f"w{i}"}]
        for turn in range(1 + i % 3):
            messages.append({"role": "user", "content": " ".join(f"w{(i + turn + j) % 57}" for j in range(1 + i % 4))})
            if i % 2:
                messages.append({"role": "assistant", "content": "w50 w51"})
        rows.append({"id": f"c{i}", "messages": messages})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_every_turn_is_answered_in_the_context_of_the_answers_before(ending_target, tmp_path):
    output = tmp_path / "out.jsonl"
    assert run(ending_target, conversations(tmp_path / "prompts.jsonl"), output, batch_size=4, max_new_tokens=40) == 9
    model, chat = pair(ending_target)
    turns = {}
    for row in read_jsonl(output):
        ids = [*row.get("earlier_output_ids", []), row["output_ids"]]
        places = [i for i, message in enumerate(row["messages"]) if message["role"] == "assistant"]
        assert row["messages"][0]["role"] == "system" and len(places) == len(ids)
        for place, said in zip(places, ids, strict=True):
            assert said == alone(model, chat, row["messages"][:place], 40)
            assert row["messages"][place]["content"] == chat.tokenizer.decode(said[:-1])
        turns[row["id"]] = len(ids)
    assert turns == {f"c{i}": 1 + i % 3 for i in range(9)}
    manifest = Manifest.beside(output)
    assert manifest.counts["rows"] == 9 and manifest.counts["turns"] == 18 and manifest.counts["finished"] == 1
    assert manifest.counts["tokens"] == sum(
        len(ids) for row in read_jsonl(output) for ids in [row["output_ids"], *row.get("earlier_output_ids", [])]
    )


def test_an_answer_cut_off_ends_its_conversation(target_folder, tmp_path):
    output = tmp_path / "out.jsonl"
    run(target_folder, conversations(tmp_path / "prompts.jsonl"), output, max_new_tokens=1)
    rows = list(read_jsonl(output))
    assert not any(row["finished"] for row in rows) and all("earlier_output_ids" not in row for row in rows)
    assert all([m["role"] for m in row["messages"]] == ["system", "user", "assistant"] for row in rows)


def test_max_turns_and_max_context_bound_a_conversation(ending_target, tmp_path):
    prompts, output = conversations(tmp_path / "prompts.jsonl"), tmp_path / "out.jsonl"
    run(ending_target, prompts, output, max_turns=1)
    assert all("earlier_output_ids" not in row for row in read_jsonl(output))
    run(ending_target, prompts, tmp_path / "short.jsonl", max_context=12)
    chat = pair(ending_target)[1]
    for row in read_jsonl(tmp_path / "short.jsonl"):
        assert len(chat.prompt_ids(row["messages"][:-1])) + len(row["output_ids"]) <= 12
    with pytest.raises(ValueError, match="None of 9 prompts could be answered; the first, 'c0': its prompt of 10"):
        run(ending_target, prompts, tmp_path / "none.jsonl", max_context=5)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"max_new_tokens": 9}, "another max_new_tokens"),
        ({"temperature": 1.0}, "another temperature"),
        ({"template_options": {"enable_thinking": False}}, "another template options"),
        ({"dtype": "bfloat16"}, "another dtype"),
    ],
)
def test_answers_made_otherwise_are_not_mixed(target_folder, prompt_file, tmp_path, changes, said):
    output = tmp_path / "out.jsonl"
    run(target_folder, prompt_file, output, limit=2)
    content = output.read_text()
    with pytest.raises(ValueError, match=rf"out\.jsonl holds answers made with {said} .*name another output"):
        run(target_folder, prompt_file, output, **changes)
    assert output.read_text() == content


def test_another_target_or_a_missing_manifest_is_refused(target_folder, ending_target, prompt_file, tmp_path):
    output = tmp_path / "out.jsonl"
    run(target_folder, prompt_file, output, limit=2)
    manifest = Manifest.beside(output)
    assert (
        manifest.target == Path(target_folder).name
        and manifest.revision.startswith("sha256:")
        and manifest.decoding["dtype"] == "float32"
    )
    Manifest(**(vars(manifest) | {"target": target_folder})).save_beside(output)  # as older ones have it
    assert run(target_folder, prompt_file, output, limit=2) == 0
    Manifest(**(vars(manifest) | {"revision": "sha256:0"})).save_beside(output)
    with pytest.raises(ValueError, match="made with another target"):
        run(target_folder, prompt_file, output)
    (tmp_path / "out.jsonl.manifest.json").write_text("{")
    with pytest.raises(ValueError, match="is no manifest"):
        run(target_folder, prompt_file, output)
    (tmp_path / "out.jsonl.manifest.json").unlink()
    with pytest.raises(ValueError, match=r"out\.jsonl\.manifest\.json is missing"):
        run(target_folder, prompt_file, output)


def test_the_command_writes_answers_and_tells_what_it_made(target_folder, prompt_file, tmp_path):
    arguments = ["regenerate", str(prompt_file), "--output", str(tmp_path / "out.jsonl"), "--target", target_folder]
    options = ["--max-new-tokens", "6", "--temperature", "0.7", "--top-p", "0.9", "--template-option", "a=[1]"]
    result = CliRunner().invoke(app, [*arguments, *options, "--dtype", "float32"])
    assert result.exit_code == 0, result.output
    assert "12 answers in 12 rows added to" in result.output and "tokens/s" in result.output
    cut = sum(not row["finished"] for row in read_jsonl(tmp_path / "out.jsonl"))
    assert cut and f"cut off before their end (finished is false): {cut} of 12 rows" in result.output
    manifest = Manifest.beside(tmp_path / "out.jsonl")
    assert manifest.template_options == {"a": [1]} and manifest.decoding["temperature"] == 0.7
    for wrong in ("a", "a=False", "=1"):
        result = CliRunner().invoke(app, [*arguments, "--template-option", wrong])
        assert result.exit_code == 1 and "expected NAME=JSON" in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"id": "a", ', "line 1 is not valid JSON"),
        ('{"id": ' + "1" * 5000 + "}", "line 1 holds a number of too many digits"),
        ('{"id": ' + "[" * 100_000 + "]" * 100_000 + "}", "line 1 is nested too deeply"),
        ('{"id": "\\ud800", "messages": [{"role": "user", "content": "w1"}]}', "prompts.jsonl: row .* has an id that"),
        ('{"id": "a", "prompt": "w1", "source": "\\ud800"}', "prompts.jsonl: row 'a' has a source "),
        ('{"id": "a", "messages": []}', "row 'a' has no user message"),
    ],
)
def test_bad_prompt_files_are_one_sentence_and_write_nothing(target_folder, tmp_path, line, message):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(line)
    with pytest.raises(ValueError, match=message):
        run(target_folder, prompts, tmp_path / "out.jsonl")
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize(
    "content", ["my notes, no line break", '{"id": "n", "text": "whole row"}', "a line\nand more", "{}\n"]
)
def test_an_output_that_holds_other_things_is_refused_and_left_as_it_is(target_folder, prompt_file, tmp_path, content):
    output = tmp_path / "out.jsonl"
    output.write_text(content)
    with pytest.raises(ValueError, match=r"out\.jsonl holds something else than answers"):
        run(target_folder, prompt_file, output)
    assert output.read_text() == content


@pytest.mark.parametrize(
    ("name", "said"), [("p.jsonl", r"no rows in .*p\.jsonl; give"), ("", "prompts is empty; give")]
)
def test_no_prompts_are_one_sentence_and_leave_no_output(target_folder, tmp_path, name, said):
    (tmp_path / "p.jsonl").write_text("\n")
    with pytest.raises(ValueError, match=said):
        run(target_folder, name and tmp_path / name, tmp_path / "out" / "out.jsonl")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["chat_template", "add_generation_prompt", "return_dict", "padding", "tokenize"])
def test_what_the_template_never_sees_is_no_option_of_it(target_folder, prompt_file, tmp_path, name):
    with pytest.raises(ValueError, match=f"template option '{name}' is an argument of .* leave it out"):
        run(target_folder, prompt_file, tmp_path / "out.jsonl", template_options={name: "x"})
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize(
    "change", [{"output_ids": 5}, {"earlier_output_ids": 5}, {"earlier_output_ids": [5]}, {"tokens": "five"}]
)
def test_kept_answers_whose_ids_are_none_are_named(target_folder, prompt_file, tmp_path, change):
    output = tmp_path / "out.jsonl"
    row = {"id": "p1", "messages": [{"role": "assistant", "content": "w1"}], "finished": True, "output_ids": [7]}
    output.write_text(json.dumps(row | change) + "\n")
    with pytest.raises(ValueError, match=r"out\.jsonl: row 'p1' has output_ids that are no token ids, or tokens"):
        run(target_folder, prompt_file, output)


def test_prompts_are_never_their_own_output(target_folder, prompt_file):
    content = prompt_file.read_text().rstrip("\n")
    prompt_file.write_text(content)
    with pytest.raises(ValueError, match="name another output"):
        run(target_folder, prompt_file, prompt_file)
    assert prompt_file.read_text() == content


def test_an_answer_that_lost_only_its_line_break_is_kept(target_folder, prompt_file, tmp_path):
    output = tmp_path / "out.jsonl"
    run(target_folder, prompt_file, output)
    content = output.read_text()
    for left in (content.rstrip("\n"), content.rstrip("\n") + "\0" * 5, content + "\0" * 5):  # zeros: a power cut
        output.write_text(left)
        assert run(target_folder, prompt_file, output) == 0
        assert output.read_text() == content


@pytest.mark.parametrize(
    "messages",
    ["hi", ["hi"], {"role": "user"}, [{"role": "user"}], [{"content": "w1"}], [{"role": "user", "content": 5}],
     {"role": "user", "content": "w1"}, [{"role": "user", "content": [{"type": "text", "text": 5}]}],
     [{"role": "user", "content": "\ud800"}]],
)  # fmt: skip
def test_messages_that_are_no_text_are_named(target_folder, tmp_path, messages):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"id": "odd", "messages": messages}))
    with pytest.raises(ValueError, match=r"prompts\.jsonl: row 'odd' has a message .*, expected a list of messages"):
        run(target_folder, prompts, tmp_path / "out.jsonl")


def test_of_two_prompts_of_one_id_the_second_is_counted(target_folder, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"id": 1, "messages": [{"role": "user", "content": word}]} for word in ("w1", "w2")]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ValueError, match="Two different prompts have the id '1'"):
        run(target_folder, prompts, tmp_path / "strict.jsonl", strict=True)
    assert not (tmp_path / "strict.jsonl").exists()
    assert run(target_folder, prompts, tmp_path / "out.jsonl") == 1


@pytest.mark.parametrize(
    ("target", "dtype", "said"),
    [("", "int3", "dtype is 'int3'"), ("absent/x", "float32", "no such"), ("list", "float32", "could not be loaded")],
)
def test_a_target_that_cannot_be_loaded_is_one_sentence(
    target_folder, prompt_file, tmp_path, monkeypatch, target, dtype, said
):
    shutil.copytree(target_folder, tmp_path / "list")
    (tmp_path / "list" / "config.json").write_text("[]")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=said):
        run(target or target_folder, prompt_file, tmp_path / "out.jsonl", dtype=dtype)
