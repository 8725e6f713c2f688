import json

import pytest
from lilicorr.training.chat import Chat
from lilicorr.training.data import Example, batches, collate, cut_loop, load_examples
from lilicorr.training.manifest import Manifest
from lilicorr.training.rows import read_jsonl
from lilicorr.training.tally import Tally
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


def supervised(example, tokenizer):
    """The example's text with what is supervised in brackets."""
    said = [
        f"[{tokenizer.decode(i)}]" if on else tokenizer.decode(i)
        for i, on in zip(example.input_ids, example.loss_mask, strict=True)
    ]
    return " ".join(said).replace("] [", " ")


def test_exact_output_ids_are_supervised_and_prompt_is_not(tmp_path, target_folder):
    tokenizer = AutoTokenizer.from_pretrained(target_folder)
    path = write_rows(tmp_path / "a.jsonl", [answer_row(output_ids=[9, 10, 2])])
    (example,) = load_examples([path], tokenizer, max_length=64)
    assert supervised(example, tokenizer) == "user : w0 </s> assistant : [w2 w3 </s>]"
    batch = collate([example, Example("b", [1, 5, 6], [False, True, True])])
    assert batch.loss_mask.sum(dim=1).tolist() == [3, 2]
    assert batch.input_ids[0, -3:].tolist() == [9, 10, 2]
    assert batch.loss_mask[1].tolist() == [False, True, True] + [False] * (batch.input_ids.shape[1] - 3)


def test_an_answer_without_ids_is_read_out_of_the_rendered_text(tmp_path, target_folder):
    tokenizer = AutoTokenizer.from_pretrained(target_folder)
    (example,) = load_examples([write_rows(tmp_path / "a.jsonl", [answer_row()])], tokenizer, 64)
    assert supervised(example, tokenizer) == "user : w0 </s> assistant : [w1 w2 w3 </s>]"
    (example,) = load_examples([write_rows(tmp_path / "b.jsonl", [answer_row(finished=False)])], tokenizer, 64)
    assert supervised(example, tokenizer) == "user : w0 </s> assistant : [w1 w2 w3]"


def two_turns(**extra):
    said = [("system", "w9"), ("user", "w0"), ("assistant", "w1 w2"), ("user", "w3"), ("assistant", "w4 w5")]
    return {"id": "m", "messages": [{"role": role, "content": text} for role, text in said], **extra}


def test_every_answer_of_a_conversation_is_supervised(tmp_path, target_folder):
    tokenizer = AutoTokenizer.from_pretrained(target_folder)
    whole = "<pad> : w9 </s> user : w0 </s> assistant : [w1 w2 </s>] user : w3 </s> assistant : [w4 w5 </s>]"
    ids = {"earlier_output_ids": [[8, 9, 2]], "output_ids": [11, 12, 2]}
    for row in (two_turns(), two_turns(**ids)):
        (example,) = load_examples([write_rows(tmp_path / "a.jsonl", [row])], tokenizer, 64)
        assert supervised(example, tokenizer) == whole
        tally = Tally()
        (cut,) = load_examples([tmp_path / "a.jsonl"], tokenizer, 13, tally=tally)
        assert tally.counts == {"an answer that begins too late in 13 tokens (max_length)": 1}
        assert supervised(cut, tokenizer) == whole[: whole.index(" user : w3")]


def test_earlier_answers_without_ids_beside_a_last_one_with_ids_are_context(tmp_path, target_folder):
    tokenizer = AutoTokenizer.from_pretrained(target_folder)
    (example,) = load_examples([write_rows(tmp_path / "a.jsonl", [two_turns(output_ids=[11, 2])])], tokenizer, 64)
    assert supervised(example, tokenizer).endswith("assistant : w1 w2 </s> user : w3 </s> assistant : [w4 </s>]")
    assert sum(example.loss_mask) == 2


def test_answers_whose_ids_are_not_those_of_their_text_are_sequences_of_their_own(tmp_path, target_folder):
    """A context is what the template makes of the text; it need not hold the ids that were once said."""
    tokenizer = AutoTokenizer.from_pretrained(target_folder)
    row = two_turns(earlier_output_ids=[[8, 8, 9, 2]], output_ids=[11, 12, 2])
    first, second = load_examples([write_rows(tmp_path / "a.jsonl", [row])], tokenizer, 64)
    assert supervised(first, tokenizer).endswith("user : w0 </s> assistant : [w1 w1 w2 </s>]")
    assert supervised(second, tokenizer).endswith("assistant : w1 w2 </s> user : w3 </s> assistant : [w4 w5 </s>]")
    assert (first.id, second.id) == ("m", "m (turn 2)")


THINKING = (  # as Qwen3: earlier turns lose their thinking, the generation prompt fills in an empty one
    "{% set last = namespace(user=-1) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'assistant' and loop.index0 > last.user %}"
    "{{ 'assistant : <think> ' + (m.reasoning_content or '') + ' </think> ' + m.content + ' </s> ' }}"
    "{% else %}{{ m.role + ' : ' + m.content + ' </s> ' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant : ' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>  </think> ' }}{% endif %}{% endif %}"
)


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("with_ids", [True, False])
def test_thinking_that_the_template_puts_in_is_not_supervised(tmp_path, word_tokenizer, thinking, with_ids):
    tokenizer = word_tokenizer(THINKING)
    ids = {"earlier_output_ids": [[9, 10, 1]], "output_ids": [12, 13, 1]} if with_ids else {}
    path = write_rows(tmp_path / "a.jsonl", [two_turns(**ids)])
    manifest_for(path, tokenizer, enable_thinking=thinking)
    found = load_examples([path], tokenizer, 64)
    if thinking and with_ids:  # it was free to think and did not, so the context of the second answer holds the first
        (example,) = found
        said = "assistant : [w1 w2 </s>] user : w3 </s> assistant : [w4 w5 </s>]"
        assert supervised(example, tokenizer) == f"system : w9 </s> user : w0 </s> {said}"
        return
    first, second = (supervised(example, tokenizer) for example in found)
    assert first == "system : w9 </s> user : w0 </s> assistant : <think> </think> [w1 w2 </s>]"
    context = "system : w9 </s> user : w0 </s> assistant : w1 w2 </s> user : w3 </s>"
    assert second == f"{context} assistant : <think> </think> [w4 w5 </s>]"


def test_thinking_that_the_target_said_is_supervised(tmp_path, word_tokenizer):
    tokenizer = word_tokenizer(THINKING)
    row = answer_row("w2 w3")
    row["messages"][-1]["reasoning_content"] = "w2 w7"
    (example,) = load_examples([write_rows(tmp_path / "a.jsonl", [row])], tokenizer, 64)
    assert supervised(example, tokenizer) == "user : w0 </s> assistant : [<think> w2 w7 </think> w2 w3 </s>]"


def test_generation_spans_of_the_template_are_the_mask(tmp_path, word_tokenizer):
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{{ 'assistant : ' }}"
        "{% generation %}{{ 'w19 ' + m.content + ' </s>' }}{% endgeneration %}{{ ' ' }}"
        "{% else %}{{ m.role + ' : ' + m.content + ' </s> ' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant : ' }}{% endif %}"
    )
    tokenizer = word_tokenizer(template)
    (example,) = load_examples([write_rows(tmp_path / "a.jsonl", [two_turns()])], tokenizer, 64)
    said = "assistant : [w19 w1 w2 </s>] user : w3 </s> assistant : [w19 w4 w5 </s>]"
    assert supervised(example, tokenizer) == f"system : w9 </s> user : w0 </s> {said}"


def test_a_template_that_leaves_nothing_to_supervise_is_shown(tmp_path, word_tokenizer):
    silent = (
        "{% for m in messages %}{{ m.role + ' : ' + ('' if m.role == 'assistant' else m.content) + ' </s> ' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ 'assistant : ' }}{% endif %}"
    )
    path = write_rows(tmp_path / "a.jsonl", [answer_row()])
    with pytest.raises(
        ValueError, match=r"row 'a' leaves no token to supervise.* is 'user : w0 </s> assistant :  </s> '"
    ):
        load_examples([path], word_tokenizer(silent), 64)
    write_rows(path, [answer_row(), answer_row(output_ids=[8, 1])])
    with pytest.warns(UserWarning, match="1 answers are left out"):
        assert len(load_examples([path], word_tokenizer(silent), 64)) == 1


def manifest_for(path, tokenizer, **options):
    Manifest("target", None, Chat(tokenizer).digest, options).save_beside(path)


def test_answers_of_another_chat_template_are_refused(tmp_path, word_tokenizer):
    path = write_rows(tmp_path / "a.jsonl", [answer_row(output_ids=[8, 1])])
    manifest_for(path, word_tokenizer(THINKING + " "))
    with pytest.raises(ValueError, match="another chat template than this target's"):
        load_examples([path], word_tokenizer(THINKING), 64)


def test_a_tokenizer_without_a_template_and_a_template_that_refuses_are_said(tmp_path, word_tokenizer):
    path = write_rows(tmp_path / "a.jsonl", [two_turns()])
    with pytest.raises(ValueError, match="has no chat template"):
        load_examples([path], word_tokenizer(None), 64)
    with pytest.raises(ValueError, match=r"refuses messages of system, user .*: no system please"):
        load_examples([path], word_tokenizer("{{ raise_exception('no system please') }}"), 64)


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


@pytest.mark.parametrize(
    ("rows", "max_length", "said"),
    [
        ([], 64, r"There are no rows in .*a\.jsonl; give answers"),
        (
            [answer_row(output_ids=[9])],
            64,
            "an answer with fewer than the two tokens that a block needs: 1 ",
        ),
        ([answer_row(output_ids=[9, 8, 7])] * 2, 6, r"an answer that begins too late in 6 tokens \(max_length\): 2 "),
    ],
)
def test_why_no_answer_can_be_used_is_said(tmp_path, target_folder, rows, max_length, said):
    with pytest.raises(ValueError, match=said):
        load_examples(
            [write_rows(tmp_path / "a.jsonl", rows)], AutoTokenizer.from_pretrained(target_folder), max_length
        )


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"earlier_output_ids": 5}, "row 'a' has output_ids that are no token ids"),
        ({"messages": {"role": "assistant", "content": "w1"}}, "expected a list of messages"),
        ({"messages": [*answer_row()["messages"][:1], {**answer_row()["messages"][1], "reasoning": 5}]}, "a message"),
        ({"id": "\ud800"}, "row '.ud800' has an id that UTF-8 cannot hold; give it another"),
    ],
)
def test_answers_of_the_wrong_kind_are_named(tmp_path, target_folder, change, said):
    path = write_rows(tmp_path / "a.jsonl", [answer_row() | change])
    with pytest.raises(ValueError, match=rf"a\.jsonl: row .*{said}|a\.jsonl: {said}"):
        load_examples([path], AutoTokenizer.from_pretrained(target_folder), 64)


def test_loops_are_cut_where_the_gram_would_stand_once_too_often():
    ids = [7, 8, *[1, 2, 3, 4] * 6]
    assert cut_loop(ids, limit=3) == [7, 8, *[1, 2, 3, 4] * 2, 1, 2, 3]
    assert cut_loop(ids, limit=0) == ids
    assert cut_loop([1, 2], limit=1) == [1, 2]


def test_order_is_a_function_of_seed_and_epoch_and_covers_everything():
    examples = [Example(str(i), [1] + [2] * (1 + i % 9), [False] + [True] * (1 + i % 9)) for i in range(70)]
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
