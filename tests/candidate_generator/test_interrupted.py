"""A call that a person's own code ends leaves nothing behind; calls within calls and odd placements work."""

import copy
import inspect

import pytest
import torch
from lilicorr import generate
from transformers import DynamicCache, StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

OPTIONS = {"max_new_tokens": 30, "do_sample": False}


class Ends(StoppingCriteria):
    """Raises once it has been asked so often."""

    def __init__(self, after, error):
        self.left, self.error = after, error

    def __call__(self, input_ids, scores, **kwargs):
        self.left -= 1
        if self.left < 0:
            raise self.error("stop")
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


class Listener(BaseStreamer):
    """Does something at its fifth token."""

    def __init__(self, act):
        self.act, self.heard = act, []

    def put(self, value):
        self.heard += value.reshape(-1).tolist()
        if len(self.heard) == 11:
            self.act()

    def end(self):
        pass


def interrupt():
    raise KeyboardInterrupt


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, StopIteration])
@pytest.mark.parametrize("rows", [1, 3])
def test_the_call_after_an_exception_is_as_ever(llama, llama_drafter, teach, prompt, error, rows):
    ids = prompt(6)
    plain = llama.generate(ids, **OPTIONS)
    teach(llama_drafter, plain[0])
    for after in (0, 1, 6):
        with pytest.raises(error, match="stop"):
            llama.generate(
                ids.repeat(rows, 1), **OPTIONS, assistant_model=llama_drafter,
                stopping_criteria=StoppingCriteriaList([Ends(after, error)]),
            )  # fmt: skip
        with pytest.raises(error, match="stop"):
            generate(
                llama, llama_drafter, [[1], [2, 3]], **OPTIONS,
                stopping_criteria=StoppingCriteriaList([Ends(after, error)]),
            )  # fmt: skip
        assert torch.equal(llama.generate(ids, assistant_model=llama_drafter, **OPTIONS), plain)


@pytest.mark.parametrize("wrong", [(), (2,)])
def test_a_text_that_is_interrupted_goes_on_from_its_cache(target, new_drafter, teach, prompt, wrong):
    """The cache then holds rows of the text alone, and none of the drafted tokens that were under way."""
    ids = prompt(6)
    plain = target.generate(ids, **OPTIONS)
    drafter = teach(new_drafter(target, "lilicorr"), plain[0], wrong_slots=wrong, spare=True)
    cache = DynamicCache(config=target.config)
    given = {"cache" if "cache" in inspect.signature(target.forward).parameters else "past_key_values": cache}
    listener = Listener(interrupt)
    with pytest.raises(KeyboardInterrupt):
        target.generate(ids, **given, **OPTIONS, assistant_model=drafter, streamer=listener)
    assert listener.heard == plain[0, :11].tolist() and cache.get_seq_length() < 11
    rest = OPTIONS | {"max_new_tokens": 36 - 20}
    assert torch.equal(target.generate(plain[:, :20], **given, **rest, assistant_model=drafter), plain)


def test_a_streamer_that_generates_with_the_same_drafter(llama, llama_drafter, teach, prompt):
    ids, inner = prompt(6), []
    plain = llama.generate(ids, **OPTIONS)
    teach(llama_drafter, plain[0])
    listener = Listener(lambda: inner.append(llama.generate(ids, assistant_model=llama_drafter, **OPTIONS)))
    assert torch.equal(llama.generate(ids, assistant_model=llama_drafter, streamer=listener, **OPTIONS), plain)
    assert torch.equal(inner[0], plain) and llama_drafter.last_generation.committed == 30


def test_inference_mode_and_then_without(llama, llama_drafter, prompt):
    ids = prompt(6)
    plain = llama.generate(ids, **OPTIONS)
    with torch.inference_mode():
        assert torch.equal(llama.generate(ids, assistant_model=llama_drafter, **OPTIONS), plain)
    assert torch.equal(llama.generate(ids, assistant_model=llama_drafter, **OPTIONS), plain)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_drafter_of_another_dtype(llama, llama_drafter, prompt, dtype):
    plain = llama.generate(prompt(6), **OPTIONS)
    other = copy.deepcopy(llama_drafter).to(dtype)
    assert torch.equal(llama.generate(prompt(6), assistant_model=other, **OPTIONS), plain)


def test_a_drafter_without_weights_and_a_prompt_without_tokens(llama, llama_drafter, prompt):
    with pytest.raises(ValueError, match=r"holds no weights .*meta.*load them with from_pretrained"):
        llama.generate(prompt(6), assistant_model=copy.deepcopy(llama_drafter).to("meta"), **OPTIONS)
    with pytest.raises(ValueError, match="The prompt has no tokens"):
        llama.generate(prompt(6)[:, :0], assistant_model=llama_drafter, **OPTIONS)


def test_more_nodes_than_anyone_verifies(llama, llama_drafter, prompt):
    """Asked for in earnest they would take 40 GB for the mask of a pass."""
    plain = llama.generate(prompt(6), **OPTIONS)
    assert torch.equal(
        llama.generate(prompt(6), assistant_model=llama_drafter, num_assistant_tokens=100_000, **OPTIONS), plain
    )
