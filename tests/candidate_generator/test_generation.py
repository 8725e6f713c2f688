"""Any number of prompts: every answer is that of `generate` alone, whatever shares its passes."""

import pytest
import torch
from lilicorr import generate
from lilicorr.candidate_generator import target_cache

from ..tiny import tiny_target

OPTIONS = {"max_new_tokens": 30, "do_sample": False, "eos_token_id": [5, 9, 20], "pad_token_id": 0}


@pytest.fixture
def prompts(prompt):
    return [prompt(length, seed=length)[0].tolist() for length in (1, 5, 30, 3, 17, 8, 2, 11, 60)]


def alone(target, prompts, options):
    return [target.generate(torch.tensor([ids]), **options)[0] for ids in prompts]


@pytest.mark.parametrize("batch_size", [1, 2, 4, 16])
def test_answers_are_those_of_generate_alone(target, drafter, prompts, batch_size):
    expected = alone(target, prompts, OPTIONS)
    assert len({len(answer) - len(ids) for answer, ids in zip(expected, prompts, strict=True)}) > 3  # rows end apart
    answers = generate(target, drafter, prompts, batch_size=batch_size, **OPTIONS)
    assert all(torch.equal(*pair) for pair in zip(answers, expected, strict=True))
    figures = drafter.last_generation.rows
    assert [each.committed for each in figures] == [len(a) - len(p) for a, p in zip(answers, prompts, strict=True)]


def test_a_freed_row_is_refilled_and_gaps_are_packed(llama, llama_drafter, prompts, monkeypatch):
    passes = []
    monkeypatch.setattr(target_cache, "_HOLES", 4)
    llama.register_forward_hook(lambda module, args, kwargs, out: passes.append(out.logits.shape[0]), with_kwargs=True)
    expected = alone(llama, prompts * 3, OPTIONS)
    passes.clear()
    answers = generate(llama, llama_drafter, prompts * 3, batch_size=3, **OPTIONS)
    assert all(torch.equal(*pair) for pair in zip(answers, expected, strict=True))
    shared = [rows for rows in passes if rows > 1]
    assert shared.count(3) > 0.8 * len(shared) and max(shared) == 3


def test_processors_and_criteria_of_each_prompt_are_its_own(llama, llama_drafter, prompts):
    options = {
        "max_new_tokens": 20,
        "min_new_tokens": 6,
        "do_sample": False,
        "repetition_penalty": 1.2,
        "no_repeat_ngram_size": 2,
    }
    options |= {"eos_token_id": [5, 9, 20], "pad_token_id": 0}
    answers = generate(llama, llama_drafter, prompts, batch_size=4, **options)
    assert all(torch.equal(*pair) for pair in zip(answers, alone(llama, prompts, options), strict=True))


def test_targets_whose_rows_cannot_share_a_pass_answer_one_by_one(llama, new_drafter, prompts, monkeypatch):
    drafter = new_drafter(llama, "none")
    monkeypatch.setattr("lilicorr.candidate_generator.generation.can_share", lambda *_: False)
    answers = generate(llama, drafter, prompts[:3], batch_size=2, **OPTIONS)
    assert all(torch.equal(*pair) for pair in zip(answers, alone(llama, prompts[:3], OPTIONS), strict=True))
    assert len(drafter.last_generation.rows) == 3


def test_sampled_answers_end_and_stay_in_order(llama, llama_drafter, prompts):
    torch.manual_seed(0)
    answers = generate(llama, llama_drafter, prompts, batch_size=3, max_new_tokens=7, do_sample=True, top_k=0)
    assert [answer[: len(ids)].tolist() for answer, ids in zip(answers, prompts, strict=True)] == prompts
    assert {len(answer) - len(ids) for answer, ids in zip(answers, prompts, strict=True)} == {7}


def test_no_prompts_give_no_answers(llama, llama_drafter):
    assert generate(llama, llama_drafter, []) == []


def test_what_cannot_work_is_one_sentence(llama, llama_drafter, prompts):
    for wrong in (0, "4", 2.5, None):
        with pytest.raises(ValueError, match=f"batch_size is {wrong!r}, expected a whole number from 1 on"):
            generate(llama, llama_drafter, prompts, batch_size=wrong)
    with pytest.raises(ValueError, match="Prompt 1 has no tokens"):
        generate(llama, llama_drafter, [[1], []])
    with pytest.raises(ValueError, match="use_cache is False"):
        generate(llama, llama_drafter, prompts, use_cache=False)
    with pytest.raises(ValueError, match="vocab_size 112, but this drafter was made for a target with 97"):
        generate(tiny_target(vocab_size=112), llama_drafter, prompts)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["abc"], "Prompt 0 is 'abc', expected its token ids"),
        ([5, 6], "Prompt 0 is 5, expected its token ids"),
        ([[1], [["x"]]], "Prompt 1 is no list of numbers"),
        ([torch.ones(2, 5, dtype=torch.long)], r"Prompt 0 has the shape \[2, 5\], .*in a single row"),
        ([[1.5, 2.0]], "Prompt 0 holds torch.float32 values"),
        ([[5, 500]], "Prompt 0 holds the id 500, expected its token ids, whole numbers below 97"),
        ([[5], [-1]], "Prompt 1 holds the id -1"),
    ],
)
def test_prompts_that_are_no_token_ids_are_named(llama, llama_drafter, given, told):
    with pytest.raises(ValueError, match=told) as caught:
        generate(llama, llama_drafter, given)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        {"attention_mask": torch.ones(1, 2)}, {"cache": object()}, {"streamer": object()},
        {"input_ids": torch.ones(1, 2)},
        {"assistant_model": object()}, {"custom_generate": "x"}, {"num_beams": 2},
        {"num_return_sequences": 2, "do_sample": True},
    ],
)  # fmt: skip
def test_options_that_many_prompts_cannot_share_are_refused(llama, llama_drafter, options):
    with pytest.raises(ValueError, match=f"{next(iter(options))}.*leave it out"):
        generate(llama, llama_drafter, [[1], [2, 3]], max_new_tokens=4, **options)


def test_target_and_drafter_in_the_wrong_order(llama, llama_drafter):
    with pytest.raises(TypeError, match="Got a LiLiCorrModel as target and a LlamaForCausalLM as drafter"):
        generate(llama_drafter, llama, [[1]])
    with pytest.raises(TypeError, match="Got a LlamaForCausalLM as target and a str as drafter"):
        generate(llama, "owner/name", [[1]])


def test_a_compiled_target_answers(llama, llama_drafter, prompts):
    compiled = torch.compile(llama, backend="eager")
    answers = generate(compiled, llama_drafter, prompts[:3], batch_size=2, **OPTIONS)
    assert all(torch.equal(*pair) for pair in zip(answers, alone(llama, prompts[:3], OPTIONS), strict=True))


def test_the_texts_own_continuation_is_proposed_as_the_answer_grows(llama, new_drafter, prompt):
    """An answer that loops is soon foretold by itself, whatever the drafter says."""
    drafter = new_drafter(llama, "none")
    ids = prompt(3)
    bias = {"sequence_bias": {(token,): -100.0 for token in range(97) if token not in (11, 12, 13)}}
    options = {"max_new_tokens": 60, "do_sample": False, "repetition_penalty": 1.0} | bias
    plain = llama.generate(ids, **options)
    assert torch.equal(llama.generate(ids, assistant_model=drafter, **options), plain)
    assert not set(plain[0, 3:].tolist()) & set(ids[0].tolist())  # nothing of it stands in the prompt
    assert drafter.last_generation.accepted_by_source["text"] > 20
