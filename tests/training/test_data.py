import json

import pytest
from lilicorr.training.data import Example, batches, collate, cut_loop, load_examples, read_jsonl
from transformers import AutoTokenizer


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def answer_row(words="w1 w2 w3", **extra):
    messages = [{"role": "user", "content": "w0"}, {"role": "assistant", "content": words}]
    return {"id": "a", "messages": messages, **extra}


def test_broken_line_is_named_by_file_and_number(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"id": 1}\n\n{"id": 2, "mess\n')
    with pytest.raises(ValueError, match=r"rows\.jsonl line 3 is not valid JSON"):
        list(read_jsonl(path))


def test_line_that_is_no_object_is_refused(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("[1]\n")
    with pytest.raises(ValueError, match="line 1 holds list"):
        list(read_jsonl(path))


def test_exact_output_ids_are_supervised_and_prompt_is_not(tmp_path, target_folder):
    tokenizer = AutoTokenizer.from_pretrained(target_folder)
    path = write_rows(tmp_path / "a.jsonl", [answer_row(output_ids=[9, 10, 2])])
    (example,) = load_examples([path], tokenizer, max_length=64)
    assert example.answer_ids == [9, 10, 2]
    assert tokenizer.decode(example.prompt_ids) == "user : w0 </s> assistant :"
    batch = collate([example, Example("b", [1], [5, 6])])
    assert batch.loss_mask.sum(dim=1).tolist() == [3, 2]
    assert batch.input_ids[0, -3:].tolist() == [9, 10, 2]
    assert batch.loss_mask[1].tolist() == [False, True, True] + [False] * (batch.input_ids.shape[1] - 3)


def test_answer_without_ids_is_tokenised(tmp_path, target_folder):
    tokenizer = AutoTokenizer.from_pretrained(target_folder)
    (example,) = load_examples([write_rows(tmp_path / "a.jsonl", [answer_row()])], tokenizer, 64)
    assert tokenizer.decode(example.answer_ids) == "w1 w2 w3"


def test_max_length_cuts_the_answer_and_drops_prompts_without_room(tmp_path, target_folder):
    tokenizer = AutoTokenizer.from_pretrained(target_folder)
    path = write_rows(tmp_path / "a.jsonl", [answer_row(output_ids=list(range(8, 40)))])
    (example,) = load_examples([path], tokenizer, max_length=10)
    assert len(example) == 10
    with pytest.raises(ValueError, match="No usable answer"):
        load_examples([path], tokenizer, max_length=4)


def test_row_that_ends_without_an_answer_is_refused(tmp_path, target_folder):
    path = write_rows(tmp_path / "a.jsonl", [{"id": "x", "messages": [{"role": "user", "content": "w1"}] * 2}])
    with pytest.raises(ValueError, match="row 'x' does not end with an assistant message"):
        load_examples([path], AutoTokenizer.from_pretrained(target_folder), 64)


def test_loops_are_cut_where_the_gram_would_stand_once_too_often():
    ids = [7, 8, *[1, 2, 3, 4] * 6]
    assert cut_loop(ids, limit=3) == [7, 8, *[1, 2, 3, 4] * 2, 1, 2, 3]
    assert cut_loop(ids, limit=0) == ids
    assert cut_loop([1, 2], limit=1) == [1, 2]


def test_order_is_a_function_of_seed_and_epoch_and_covers_everything():
    examples = [Example(str(i), [1], [2] * (1 + i % 9)) for i in range(70)]
    first = batches(examples, 5, seed=3, epoch=0)
    assert first == batches(examples, 5, seed=3, epoch=0)
    assert first != batches(examples, 5, seed=3, epoch=1)
    assert first != batches(examples, 5, seed=4, epoch=0)
    assert sorted(i for group in first for i in group) == list(range(70))
    with pytest.raises(ValueError, match="do not fill one batch"):
        batches(examples[:3], 5, seed=0, epoch=0)


def test_a_file_that_is_not_utf8_is_named_and_a_byte_order_mark_skipped(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"id": 1}\n')
    assert list(read_jsonl(path)) == [{"id": 1}]
    path.write_bytes(b'{"id": 1}\n{"id": "\xe9"}\n')
    with pytest.raises(ValueError, match=r"rows\.jsonl line 2 is not UTF-8"):
        list(read_jsonl(path))
