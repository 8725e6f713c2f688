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
