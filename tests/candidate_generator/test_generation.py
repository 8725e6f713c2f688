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
    with pytest.raises(ValueError, match="batch_size is 0, expected 1 or more"):
        generate(llama, llama_drafter, prompts, batch_size=0)
    with pytest.raises(ValueError, match="Prompt 1 has no tokens"):
        generate(llama, llama_drafter, [[1], []])
    with pytest.raises(ValueError, match="use_cache is False"):
        generate(llama, llama_drafter, prompts, use_cache=False)
    with pytest.raises(ValueError, match="vocab_size 112, but this drafter was made for a target with 97"):
        generate(tiny_target(vocab_size=112), llama_drafter, prompts)


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
