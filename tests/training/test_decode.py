import pytest
import torch
from lilicorr.training.chat import Chat
from lilicorr.training.decode import COLDEST, Decoding, TargetAnswers, decode, stop_ids
from lilicorr.training.prompts import Conversation
from transformers import AutoModelForCausalLM, AutoTokenizer


@pytest.fixture
def target(ending_target):
    return AutoModelForCausalLM.from_pretrained(ending_target).eval()


def prompts_of(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 12, (count,), generator=generator).tolist()
    return [torch.randint(3, 64, (length,), generator=generator).tolist() for length in lengths]


def greedy(target, prompts, caps):
    return decode(target, prompts, caps, Decoding(), [0] * len(prompts))


def test_greedy_answers_equal_generate_row_by_row(target):
    prompts = prompts_of(24)
    caps = [1 + i % 17 for i in range(24)]
    answers = greedy(target, prompts, caps)
    for prompt, cap, answer in zip(prompts, caps, answers, strict=True):
        ids = torch.tensor([prompt])
        alone = target.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=cap, do_sample=False)
        assert answer == alone[0, len(prompt) :].tolist()
    assert len({len(answer) for answer in answers}) > 3


def test_rows_that_are_over_leave_the_batch(target):
    sizes = []
    hook = target.register_forward_pre_hook(
        lambda module, args, kwargs: sizes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    greedy(target, prompts_of(24), [1 + i for i in range(24)])
    hook.remove()
    rows = [size[0] for size in sizes]
    assert rows == sorted(rows, reverse=True) and rows[0] == 24 and rows[-1] < 6
    assert all(length == 1 for _, length in sizes[1:])  # the cache goes on, nothing is read twice


def test_a_cache_that_cannot_give_up_rows_only_costs_time(target, monkeypatch):
    prompts, caps = prompts_of(12), [1 + i for i in range(12)]
    expected = greedy(target, prompts, caps)
    monkeypatch.setattr("lilicorr.training.decode._compacted", lambda output, kept: {})
    assert greedy(target, prompts, caps) == expected


def test_draws_belong_to_the_answer_whatever_the_batch(target):
    prompts, seeds = prompts_of(12), list(range(12))
    decoding = Decoding(temperature=1.0, top_p=0.95)
    together = decode(target, prompts, [12] * 12, decoding, seeds)
    assert together == [decode(target, [p], [12], decoding, [s])[0] for p, s in zip(prompts, seeds, strict=True)]
    assert together != decode(target, prompts, [12] * 12, decoding, seeds[::-1])


def test_draws_follow_the_targets_distribution(target):
    prompt, count = prompts_of(1)[0], 4000
    decoding = Decoding(temperature=1.5, top_k=6)
    drawn = [a[0] for a in decode(target, [prompt] * count, [1] * count, decoding, list(range(count)))]
    with torch.no_grad():
        logits = target(torch.tensor([prompt])).logits[0, -1] / 1.5
    top = logits.topk(6)
    shares = top.values.softmax(-1)
    assert set(drawn) <= set(top.indices.tolist())
    counts = torch.tensor([drawn.count(token) for token in top.indices.tolist()])
    assert ((counts - count * shares) ** 2 / (count * shares)).sum() < 20.5  # χ² of 5 degrees, p = 0.001


def test_a_prompt_whose_logits_are_nan_is_given_up_alone(target, ending_target):
    with torch.no_grad():
        target.get_input_embeddings().weight[13] = float("nan")  # the word w6
    chat = Chat(AutoTokenizer.from_pretrained(ending_target))
    words = {"good": "w1 w2", "bad": "w6", "fine": "w3"}
    asked = [Conversation(name, [[{"role": "user", "content": text}]], {}) for name, text in words.items()]
    found = {d.conversation.id: d for d in TargetAnswers(target, chat, Decoding(4), batch_size=3)(asked)}
    assert found["bad"].skipped.reason == "logits that are NaN" and not found["bad"].answers
    assert found["good"].answers and found["fine"].answers


def test_stop_ids_are_a_set_whatever_the_configuration_holds(target):
    for eos, expected in ((None, set()), (5, {5}), ([5, 6], {5, 6})):
        target.generation_config.eos_token_id = eos
        assert stop_ids(target) == expected


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"temperature": -1.0}, "temperature is -1.0, expected 0, which is greedy, or a finite number"),
        ({"temperature": float("inf")}, "temperature is inf, expected 0, which is greedy, or a finite number"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": 1e-38}, "temperature is 1e-38"),
        ({"temperature": 1e-320}, "of 1e-06 or more"),
        ({"max_context": -1}, "max_context is -1, expected 0 or more"),
        ({"temperature": 1.0, "top_p": 0.0}, "top_p is 0.0"),
        ({"top_k": 5}, "need a temperature above 0"),
    ],
)
def test_settings_out_of_range_are_one_sentence(changes, said):
    with pytest.raises(ValueError, match=said):
        Decoding(**changes).validate()


def test_the_coldest_temperature_is_greedy(target):
    target.get_output_embeddings().weight.data *= 1e4
    prompts = prompts_of(6)
    cold = decode(target, prompts, [6] * 6, Decoding(temperature=COLDEST), list(range(6)))
    assert cold == greedy(target, prompts, [6] * 6)
