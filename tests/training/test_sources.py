"""The mask token is one that neither the tokenizer nor the data know."""

import json

import pytest
from lilicorr import LiLiCorrConfig
from lilicorr.modeling_lilicorr.configuration_lilicorr import choose_mask_token
from lilicorr.training.sources import training_examples
from lilicorr.training.tally import Tally, Unusable
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast

TEMPLATE = "{% for m in messages %}{{ m.content + ' ' }}{% endfor %}"


def gapped(extra):
    """A tokenizer with ids 0 … 57, and those of `extra`."""
    words = {f"w{i}": i for i in range(58)} | {f"<{i}>": i for i in extra}
    tokens = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokens.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokens, unk_token="w0", eos_token="w2")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def target(vocabulary, **changes):
    return LlamaConfig(vocab_size=vocabulary, num_hidden_layers=6, eos_token_id=2, **({"pad_token_id": 1} | changes))


@pytest.fixture
def prepared(tmp_path, make_settings):
    def prepare(*answers, **changes):
        path = tmp_path / "a.jsonl"
        asked = {"role": "user", "content": "w5"}
        rows = [
            {"id": f"r{i}", "messages": [asked, {"role": "assistant", "content": "w3"}], "output_ids": ids}
            for i, ids in enumerate(answers)
        ]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return make_settings(tmp_path / "run", data=[str(path)], **{"config": {}, "head_type": "none"} | changes)

    return prepare


@pytest.mark.parametrize(
    ("extra", "vocabulary", "said", "mask"),
    [
        ((), 72, 5, 58),  # no gaps: the first row behind the tokenizer
        ((60, 61, 62), 72, 5, 63),  # 61 tokens, but the id 61 is taken
        ((60, 61, 62), 72, 63, 64),  # said, though the tokenizer does not know it
        ((60, 61, 62), 63, 5, 58),  # nothing behind: the gap
        ((60, 61, 62), 63, 58, 59),
        ((70, 71, 72), 63, 5, 58),  # tokens that the embedding lacks take no row
    ],
)
def test_a_mask_is_no_token_and_stands_in_no_row(prepared, extra, vocabulary, said, mask):
    tally = Tally()
    examples, chosen = training_examples(prepared([3, said, 2]), gapped(extra), target(vocabulary), tally)
    assert chosen == mask and len(examples) == 1 and not tally.total


def test_rows_that_hold_a_mask_there_is_no_way_round_are_left_out_and_counted(prepared):
    tally = Tally()
    settings = prepared([3, 9, 2], [3, 4, 2], config={"mask_token_id": 9})
    examples, mask = training_examples(settings, gapped(()), target(72), tally)
    assert mask == 9 and [example.id for example in examples] == ["r1"]
    assert tally.counts == {"the mask token in the text": 1} and "row r0 holds token id 9" in tally.first
    with pytest.raises(Unusable, match="row r0 holds token id 9, the drafter's mask"):
        training_examples(settings, gapped(()), target(72), Tally(strict=True))
    pad = prepared([3, 1, 2], [3, 4, 2])  # no row is free, so it is the pad token
    examples, mask = training_examples(pad, gapped(()), target(58), Tally())
    assert mask == 1 and [example.id for example in examples] == ["r1"]


def test_one_row_with_ids_that_the_target_lacks_does_not_stop_the_others(prepared):
    tally = Tally()
    examples, _ = training_examples(prepared([3, 99, 2], [3, 4, 2]), gapped(()), target(72), tally)
    assert [example.id for example in examples] == ["r1"] and tally.counts == {"a token the target lacks": 1}


def test_the_mask_is_that_of_the_checkpoint_to_start_from(prepared, tmp_path):
    LiLiCorrConfig.for_target(target(72), mask_token_id=65, head_type="none").save_pretrained(tmp_path / "stage")
    settings = prepared([3, 4, 2], init=str(tmp_path / "stage"))
    assert training_examples(settings, gapped(()), target(72), Tally())[1] == 65


def test_without_a_free_row_or_a_pad_the_recipe_must_name_a_mask(prepared):
    with pytest.raises(ValueError, match=r"row of .* is in use .*--set config\.mask_token_id=ID"):
        training_examples(prepared([3, 4, 2]), gapped(()), target(58, pad_token_id=None), Tally())
    with pytest.raises(ValueError, match="pass mask_token_id"):
        choose_mask_token(target(58, pad_token_id=2), range(58))
