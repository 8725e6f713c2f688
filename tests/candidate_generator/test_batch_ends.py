"""How a batch ends: where plain `generate` ends it, whether its rows share their passes or not."""

import inspect

import pytest
import torch
from transformers import DynamicCache, StoppingCriteria, StoppingCriteriaList
from transformers.cache_utils import StaticLayer
from transformers.generation.streamers import BaseStreamer

ENDS = [5, 9, 20, 33]


class Puts(BaseStreamer):
    """All that a streamer is given."""

    def __init__(self):
        self.given = []

    def put(self, value):
        self.given.append(value.tolist())

    def end(self):
        self.given.append("end")


class Says(StoppingCriteria):
    """Ends each row once its last token is one of these."""

    def __init__(self, tokens):
        self.tokens = torch.tensor(tokens)

    def __call__(self, input_ids, scores, **kwargs):
        return torch.isin(input_ids[:, -1], self.tokens)


@pytest.fixture(params=["together", "row by row"])
def batch(request, new_target, new_drafter):
    """A target whose rows share a pass, or whose window is too short for that, with prompts and a drafter."""
    window = {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 0}
    target = new_target("qwen3", **({} if request.param == "together" else window))
    ids = torch.randint(1, 97, (4, 10), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :4], mask[2, :9] = 0, 0
    return target, new_drafter(target, "lilicorr"), {"input_ids": ids, "attention_mask": mask, "pad_token_id": 0}


def passes_of(target, call):
    counted = []
    handle = target.register_forward_pre_hook(lambda *_: counted.append(1))
    out = target.generate(**call)
    handle.remove()
    return out, len(counted)


@pytest.mark.parametrize("ends", [None, ENDS])
def test_a_batch_ends_where_plain_generate_ends_it(batch, ends):
    target, drafter, call = batch
    whole = target.generate(**call, max_new_tokens=40, do_sample=False)
    tokens = whole[:, 13].unique().tolist()  # each row says one of them at its fourth token at the latest
    call |= {"max_new_tokens": 200, "do_sample": False, "eos_token_id": ends}
    call["stopping_criteria"] = StoppingCriteriaList([Says(tokens)])
    plain, needed = passes_of(target, call)
    assert plain.shape[1] <= 14
    ours, made = passes_of(target, call | {"assistant_model": drafter})
    assert torch.equal(ours, plain)
    assert made <= 4 * needed  # and not as many as 200 tokens take


@pytest.mark.parametrize("ends", [None, ENDS])
def test_a_streamer_of_a_batch_gets_its_steps(batch, ends):
    target, drafter, call = batch
    call |= {"max_new_tokens": 30, "do_sample": False, "eos_token_id": ends}
    plain, ours = Puts(), Puts()
    expected = target.generate(**call, streamer=plain)
    assert torch.equal(target.generate(**call, streamer=ours, assistant_model=drafter), expected)
    assert ours.given == plain.given and len(plain.given) > 10


def test_a_given_cache_of_a_batch_stays_as_it_is_and_serves_again(batch):
    """Rows end apart, so that it could not hold what they have read; plain `generate` reads on from it as before."""
    target, drafter, call = batch
    ids = call["input_ids"]
    options = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
    plain = target.generate(ids, **options)
    cache = DynamicCache(config=target.config)
    given = {"cache" if "cache" in inspect.signature(target.forward).parameters else "past_key_values": cache}
    with torch.no_grad():
        target(ids[:, :6], **given)
    for assistant in (drafter, drafter, None):
        assert torch.equal(target.generate(ids, **given, **options, assistant_model=assistant), plain)
        assert assistant is None or cache.get_seq_length() == 6


def test_a_static_cache_that_is_set_up_before_the_prompt_is_read(new_target, new_drafter):
    """In pieces, that is: it then has the batch's rows before it holds anything, and each row takes its own."""
    if not StaticLayer.is_croppable:
        pytest.skip("this release of Transformers cannot crop static caches, and drafting says so")
    target = new_target("llama")
    ids = torch.randint(1, 97, (3, 10), generator=torch.Generator().manual_seed(1))
    call = {"input_ids": ids, "max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    call |= {"cache_implementation": "static", "prefill_chunk_size": 3}
    assert torch.equal(target.generate(**call, assistant_model=new_drafter(target, "none")), target.generate(**call))
