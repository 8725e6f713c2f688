import json

import pytest
import torch
from lilicorr.training.data import prompt_token_ids, read_jsonl
from lilicorr.training.regenerate import regenerate
from transformers import AutoModelForCausalLM, AutoTokenizer


def run(target_folder, prompts, output, **changes):
    settings = {"max_new_tokens": 10, "dtype": "float32"} | changes
    return regenerate(target_folder, [str(prompts)], str(output), **settings)


def test_answers_equal_plain_generate_prompt_by_prompt(target_folder, prompt_file, tmp_path):
    output = tmp_path / "answers.jsonl"
    assert run(target_folder, prompt_file, output, batch_size=5) == 12
    model, tokenizer = AutoModelForCausalLM.from_pretrained(target_folder), AutoTokenizer.from_pretrained(target_folder)
    rows = list(read_jsonl(output))
    assert {row["id"] for row in rows} == {f"p{i}" for i in range(12)}
    for row in rows:
        prompt = torch.tensor([prompt_token_ids(tokenizer, row["messages"][:-1])])
        alone = model.generate(prompt, max_new_tokens=10, do_sample=False)[0, prompt.shape[1] :].tolist()
        assert row["output_ids"] == alone
        assert row["finished"] == (alone[-1] == 2)
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


def test_only_the_first_user_turn_is_answered_and_the_system_turn_kept(target_folder, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    turns = [("system", "w9"), ("user", "w1"), ("user", "w2")]
    messages = [{"role": role, "content": text} for role, text in turns]
    prompts.write_text(json.dumps({"id": "m", "messages": messages}))
    run(target_folder, prompts, tmp_path / "out.jsonl")
    (row,) = read_jsonl(tmp_path / "out.jsonl")
    assert [m["role"] for m in row["messages"]] == ["system", "user", "assistant"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"id": "a", ', "line 1 is not valid JSON"),
        ('{"id": "a", "messages": []}', "row 'a' has no user message"),
        ('{"messages": [{"role": "user", "content": "w1"}]}', "a row has no `id`"),
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
    output.write_text(content.rstrip("\n"))
    assert run(target_folder, prompt_file, output) == 0
    assert output.read_text() == content


@pytest.mark.parametrize(
    "messages",
    ["hi", ["hi"], {"role": "user"}, [{"role": "user"}], [{"content": "w1"}], [{"role": "user", "content": 5}],
     [{"role": "user", "content": [{"type": "text", "text": "w1"}]}], [{"role": "user", "content": "\ud800"}]],
)  # fmt: skip
def test_messages_that_are_no_text_are_named(target_folder, tmp_path, messages):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"id": "odd", "messages": messages}))
    with pytest.raises(ValueError, match=r"prompts\.jsonl: row 'odd' has a message .*, expected a list of messages"):
        run(target_folder, prompts, tmp_path / "out.jsonl")


def test_two_prompts_of_one_id_are_refused(target_folder, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"id": 1, "messages": [{"role": "user", "content": word}]} for word in ("w1", "w2")]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ValueError, match="Two different prompts have the id '1'"):
        run(target_folder, prompts, tmp_path / "out.jsonl")


@pytest.mark.parametrize(
    ("target", "dtype", "said"), [("", "fp32", "dtype is 'fp32'"), ("absent/x", "float32", "no such")]
)
def test_a_target_that_cannot_be_loaded_is_one_sentence(target_folder, prompt_file, tmp_path, target, dtype, said):
    with pytest.raises(ValueError, match=said):
        run(target or target_folder, prompt_file, tmp_path / "out.jsonl", dtype=dtype)
