"""Everything else that `generate` can be asked for, with a drafter whose proposals are accepted."""

import copy
import pickle

import pytest
import torch
from transformers import StaticCache, StoppingCriteria, StoppingCriteriaList, pipeline
from transformers.generation.streamers import BaseStreamer
from transformers.utils import output_capturing

from .conftest import all_taken

LISTS = hasattr(output_capturing, "selected_hidden_states")  # releases whose list means what it means today
STATIC = pytest.mark.skipif(not LISTS, reason="this version refuses a static cache in assisted generation")


def cache_of(output):
    name = "cache" if "cache" in output else "past_key_values"
    return name, output[name]


def with_eos(target, prompt, teach, drafter, eos_for):
    """Plain greedy text, the token that first appears at its 6th new place, and a drafter that knows the text."""
    ids = prompt(6)
    text = target.generate(ids, max_new_tokens=30, do_sample=False)
    new = text[0, 6:].tolist()
    place = next(i for i in range(5, 30) if new[i] not in new[:i])
    teach(drafter, text[0])
    return ids, text[:, : 6 + place + 1], eos_for(new[place], min(set(range(97)) - set(new)))


@pytest.mark.parametrize(
    "eos_for",
    [lambda eos, other: eos, lambda eos, other: [other, eos], lambda eos, other: torch.tensor([eos, other])],
    ids=["int", "list", "tensor"],
)
def test_stops_at_an_accepted_eos(target, drafter, prompt, teach, eos_for):
    ids, expected, eos = with_eos(target, prompt, teach, drafter, eos_for)
    options = {"max_new_tokens": 30, "do_sample": False, "eos_token_id": eos, "pad_token_id": 0}
    assert torch.equal(target.generate(ids, **options), expected)
    assert torch.equal(target.generate(ids, assistant_model=drafter, **options), expected)
    assert drafter.last_generation.committed == expected.shape[1] - 6


def test_no_eos_at_all(target, drafter, prompt):
    out = target.generate(prompt(4), max_new_tokens=11, do_sample=False, eos_token_id=None, assistant_model=drafter)
    assert out.shape[1] == 15


class StopOn(StoppingCriteria):
    def __init__(self, token):
        self.token = token

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids[:, -1] == self.token if scores is not None else torch.zeros(1, dtype=torch.bool)


def test_other_stopping_criteria_may_overrun_by_less_than_a_block(llama, llama_drafter, prompt, teach):
    """Transformers' loop asks custom criteria once a block, about the last token only; the overrun is documented."""
    ids = prompt(6)
    text = llama.generate(ids, max_new_tokens=40, do_sample=False)
    limit = 20
    teach(llama_drafter, text[0])

    class AtLeast(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return torch.tensor([input_ids.shape[1] >= limit])

    criteria = StoppingCriteriaList([AtLeast()])
    plain = llama.generate(ids, max_new_tokens=40, do_sample=False, stopping_criteria=criteria)
    out = llama.generate(
        ids, max_new_tokens=40, do_sample=False, stopping_criteria=criteria, assistant_model=llama_drafter
    )
    assert plain.shape[1] == limit
    assert limit <= out.shape[1] < limit + llama_drafter.config.block_size
    assert torch.equal(out, text[:, : out.shape[1]])


def test_custom_criterion_never_changes_the_tokens(llama, llama_drafter, prompt):
    ids = prompt(6)
    text = llama.generate(ids, max_new_tokens=40, do_sample=False)
    criteria = StoppingCriteriaList([StopOn(int(text[0, 15]))])
    out = llama.generate(
        ids, max_new_tokens=40, do_sample=False, stopping_criteria=criteria, assistant_model=llama_drafter
    )
    assert torch.equal(out, text[:, : out.shape[1]])


def test_stop_strings(llama, llama_drafter, prompt, tokenizer):
    ids = prompt(6)
    text = llama.generate(ids, max_new_tokens=40, do_sample=False)
    options = {"max_new_tokens": 40, "do_sample": False, "stop_strings": chr(30 + int(text[0, 12]))}
    plain = llama.generate(ids, tokenizer=tokenizer, **options)
    out = llama.generate(ids, tokenizer=tokenizer, assistant_model=llama_drafter, **options)
    shared = min(plain.shape[1], out.shape[1])
    assert torch.equal(out[:, :shared], plain[:, :shared])
    assert plain.shape[1] <= out.shape[1] < plain.shape[1] + llama_drafter.config.block_size


class Collector(BaseStreamer):
    def __init__(self):
        self.tokens, self.ended = [], False

    def put(self, value):
        self.tokens += value.reshape(-1).tolist()

    def end(self):
        self.ended = True


def test_streamer_gets_every_token_once_and_in_order(target, drafter, prompt, teach):
    ids = prompt(6)
    plain = target.generate(ids, max_new_tokens=20, do_sample=False)
    teach(drafter, plain[0], wrong_slots=(4,))
    streamer = Collector()
    target.generate(ids, max_new_tokens=20, do_sample=False, streamer=streamer, assistant_model=drafter)
    assert streamer.tokens == plain[0].tolist()
    assert streamer.ended


@pytest.mark.parametrize("good", [False, True])
def test_all_outputs_of_a_dictionary(target, drafter, prompt, teach, good):
    ids = prompt(6)
    target.set_attn_implementation("eager")
    options = {
        "max_new_tokens": 12,
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_logits": True,
        "output_hidden_states": True,
        "output_attentions": True,
    }
    plain = target.generate(ids, **options)
    if good:
        teach(drafter, plain.sequences[0])
    out = target.generate(ids, assistant_model=drafter, **options)
    target.set_attn_implementation("sdpa")
    assert torch.equal(out.sequences, plain.sequences)
    for name in ("scores", "logits"):
        assert len(out[name]) == len(plain[name]) == 12
        for ours, theirs in zip(out[name], plain[name], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)
    assert len(out.hidden_states) == len(plain.hidden_states)
    for ours, theirs in zip(out.hidden_states, plain.hidden_states, strict=True):
        assert len(ours) == len(theirs) == target.config.num_hidden_layers + 1
        assert [state.shape for state in ours] == [state.shape for state in theirs]
    assert len(out.attentions) == len(plain.attentions)
    assert (drafter.last_generation.accepted > 0) == good or not good


@pytest.mark.skipif(not LISTS, reason="this version counts a list of states differently, so all are asked for")
def test_only_the_tapped_states_are_kept(llama, llama_drafter, prompt):
    kept = []
    handle = llama.register_forward_hook(lambda module, args, output: kept.append(output.hidden_states))
    llama.generate(prompt(6), max_new_tokens=6, do_sample=False, assistant_model=llama_drafter)
    handle.remove()
    wanted = {layer + 1 for layer in llama_drafter.config.target_layer_ids}
    assert kept
    for states in kept:
        assert {index for index, state in enumerate(states) if state is not None} == wanted


@STATIC
@pytest.mark.parametrize("new", [2, 5, 12, 23])
def test_static_cache_is_never_overrun(target, drafter, prompt, teach, new):
    ids = prompt(6)
    options = {"max_new_tokens": new, "do_sample": False}
    plain = target.generate(ids, **options)
    for good in (False, True):
        if good:
            teach(drafter, plain[0])
        out = target.generate(ids, cache_implementation="static", assistant_model=drafter, **options)
        assert torch.equal(out, plain)


@STATIC
def test_static_cache_continues(llama, llama_drafter, prompt, teach):
    ids = prompt(6)
    whole = llama.generate(ids, max_new_tokens=40, do_sample=False)
    teach(llama_drafter, whole[0])
    cache = StaticCache(config=llama.config, max_cache_len=64)
    options = {"do_sample": False, "cache": cache, "assistant_model": llama_drafter}
    half = llama.generate(ids, max_new_tokens=15, **options)
    assert torch.equal(llama.generate(half, max_new_tokens=25, **options), whole)
    assert llama_drafter.last_generation.acceptance_length > 6


@pytest.mark.parametrize("kind", ["whole", "new", "copied", "pickled", "plain first turn"])
def test_continued_cache_of_a_chat(target, drafter, prompt, teach, kind):
    first = target.generate(prompt(6), max_new_tokens=12, do_sample=False)
    conversation = torch.cat([first, prompt(4, seed=9)], dim=1)
    plain = target.generate(conversation, max_new_tokens=20, do_sample=False)
    teach(drafter, plain[0])
    turn = target.generate(
        prompt(6),
        max_new_tokens=12,
        do_sample=False,
        return_dict_in_generate=True,
        assistant_model=None if kind == "plain first turn" else drafter,
    )
    name, cache = cache_of(turn)
    assert cache.get_seq_length() == 17
    if kind == "copied":
        cache = copy.deepcopy(cache)
    if kind == "pickled":
        cache = pickle.loads(pickle.dumps(cache))
    options = {"max_new_tokens": 20, "do_sample": False, name: cache, "assistant_model": drafter}
    if kind == "new":
        out = target.generate(conversation[:, 17:], attention_mask=torch.ones_like(conversation), **options)
        assert torch.equal(out, plain[:, 17:])
    else:
        assert torch.equal(target.generate(conversation, **options), plain)
    assert all_taken(drafter.last_generation)
    known = cache._lilicorr_context
    held = known.cache.positions[0].tolist()
    assert held == sorted(set(held))
    missing = set(range(known.rows)) - set(held)
    waiting = sum(positions.shape[1] for _, positions in known._waiting)  # of the last pass
    missing -= set(range(known.rows - waiting, known.rows))
    if kind in ("pickled", "plain first turn"):
        assert missing == set(range(17))  # the first turn's context is gone, the rest is at its true place
    else:
        assert len(missing) <= drafter.config.block_size  # the last block of the first turn


def test_new_tokens_on_a_padded_cache(llama, llama_drafter, prompt, teach):
    """The mask is longer than the ids and not all ones: it must reach every pass whole."""
    mask = torch.cat([torch.zeros(1, 5, dtype=torch.long), torch.ones(1, 6, dtype=torch.long)], dim=1)
    padded = torch.cat([torch.zeros(1, 5, dtype=torch.long), prompt(6)], dim=1)
    whole = llama.generate(prompt(6), max_new_tokens=32, do_sample=False)
    teach(llama_drafter, whole[0])
    options = {"do_sample": False, "assistant_model": llama_drafter, "return_dict_in_generate": True}
    turn = llama.generate(padded, attention_mask=mask, max_new_tokens=12, **options)
    name, cache = cache_of(turn)
    mask = torch.cat([mask, torch.ones(1, 12, dtype=torch.long)], dim=1)
    out = llama.generate(turn.sequences[:, -1:], attention_mask=mask, max_new_tokens=20, **{name: cache}, **options)
    assert torch.equal(out.sequences, whole[:, 17:])
    assert all_taken(llama_drafter.last_generation)


def test_cropped_cache_starts_a_new_context(llama, llama_drafter, prompt, teach):
    ids = prompt(6)
    plain = llama.generate(ids, max_new_tokens=20, do_sample=False)
    teach(llama_drafter, plain[0])
    options = {"do_sample": False, "assistant_model": llama_drafter}
    name, cache = cache_of(llama.generate(ids, max_new_tokens=20, return_dict_in_generate=True, **options))
    cache.crop(-(cache.get_seq_length() - 4))
    assert torch.equal(llama.generate(ids, max_new_tokens=20, **{name: cache}, **options), plain)
    assert all_taken(llama_drafter.last_generation)
    assert cache._lilicorr_context.cache.positions[0, 0] == 4


def test_two_drafters_do_not_share_a_context(llama, new_drafter, prompt):
    first, second = new_drafter(llama, "lilicorr"), new_drafter(llama, "none", num_hidden_layers=1)
    ids = prompt(6)
    plain = llama.generate(ids, max_new_tokens=20, do_sample=False)
    turn = llama.generate(ids, max_new_tokens=8, do_sample=False, return_dict_in_generate=True, assistant_model=first)
    name, cache = cache_of(turn)
    out = llama.generate(turn.sequences, max_new_tokens=12, do_sample=False, assistant_model=second, **{name: cache})
    assert torch.equal(out, plain)


def test_sliding_target_beyond_its_window(new_target, new_drafter, prompt, teach):
    target = new_target("qwen3", use_sliding_window=True, sliding_window=8, max_window_layers=2)
    drafter = new_drafter(target, "lilicorr")
    ids = prompt(6)
    plain = target.generate(ids, max_new_tokens=30, do_sample=False)
    for good in (False, True):
        if good:
            teach(drafter, plain[0], wrong_slots=(4,))
        assert torch.equal(target.generate(ids, max_new_tokens=30, do_sample=False, assistant_model=drafter), plain)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_drafter_of_another_dtype(target, drafter, prompt, dtype):
    ids = prompt(6)
    plain = target.generate(ids, max_new_tokens=16, do_sample=False)
    drafter.to(dtype)
    assert torch.equal(target.generate(ids, max_new_tokens=16, do_sample=False, assistant_model=drafter), plain)
    assert drafter.last_generation.drafted > 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a second device")
@pytest.mark.parametrize(("where", "draft_where"), [("cuda", "cpu"), ("cpu", "cuda"), ("cuda", "cuda")])
def test_target_and_drafter_on_different_devices(new_target, new_drafter, teach, prompt, where, draft_where):
    target = new_target("llama").to(where)
    drafter = new_drafter(target, "lilicorr").to(draft_where)
    ids = prompt(6).to(where)
    plain = target.generate(ids, max_new_tokens=16, do_sample=False)
    for good in (False, True):
        if good:
            teach(drafter, plain[0])
        out = target.generate(ids, max_new_tokens=16, do_sample=False, assistant_model=drafter)
        assert out.device == ids.device
        assert torch.equal(out, plain)
    assert drafter.last_generation.acceptance_length > 6


def test_vocabulary_padded_beyond_the_tokenizer_and_beyond_the_config(new_target, new_drafter, prompt, teach):
    target = new_target("llama")
    target.lm_head = torch.nn.Linear(32, 112, bias=False)
    torch.nn.init.normal_(target.lm_head.weight, std=0.35)
    target.lm_head.weight.data[97:] = 0  # rows that no token of the text uses
    drafter = new_drafter(target, "lilicorr", mask_token_id=96)
    ids = prompt(6)
    plain = target.generate(ids, max_new_tokens=16, do_sample=False)
    assert torch.equal(target.generate(ids, max_new_tokens=16, do_sample=False, assistant_model=drafter), plain)
    teach(drafter, plain[0])
    assert torch.equal(target.generate(ids, max_new_tokens=16, do_sample=False, assistant_model=drafter), plain)
    assert all_taken(drafter.last_generation)


def test_prompt_given_as_embeddings(llama, llama_drafter, prompt, teach):
    ids = prompt(6)
    embeds = llama.get_input_embeddings()(ids).detach()
    plain = llama.generate(inputs_embeds=embeds, max_new_tokens=16, do_sample=False)
    teach(llama_drafter, torch.cat([ids, plain], dim=1)[0])
    out = llama.generate(inputs_embeds=embeds, max_new_tokens=16, do_sample=False, assistant_model=llama_drafter)
    assert torch.equal(out, plain)
    assert all_taken(llama_drafter.last_generation)


def test_pipeline(target, drafter, tokenizer):
    plain = pipeline("text-generation", model=target, tokenizer=tokenizer)
    assisted = pipeline("text-generation", model=target, tokenizer=tokenizer, assistant_model=drafter)
    options = {"max_new_tokens": 12, "do_sample": False}
    assert assisted("Some text", **options) == plain("Some text", **options)
    assert drafter.last_generation.committed == 12


@pytest.mark.parametrize("changed", ["config", "generation_config"])
def test_pipeline_of_a_target_that_pads_with_its_end_token(new_target, new_drafter, tokenizer, changed):
    target = new_target("llama", eos_token_id=2)
    drafter = new_drafter(target, "lilicorr")
    getattr(target, changed).pad_token_id = 2
    options = {"max_new_tokens": 12, "do_sample": False}
    plain = pipeline("text-generation", model=target, tokenizer=tokenizer)("Some text", **options)
    assisted = pipeline("text-generation", model=target, tokenizer=tokenizer, assistant_model=drafter)
    assert assisted("Some text", **options) == plain
    assert drafter.last_generation.blocks > 0


def test_pipeline_with_what_a_drafter_cannot_serve_says_so_in_one_sentence(new_target, llama_drafter, tokenizer):
    wider = new_target("llama", vocab_size=112)
    with pytest.raises(ValueError, match="vocab_size 112, but this drafter was made for a target with 97") as caught:
        pipeline("text-generation", model=wider, tokenizer=tokenizer, assistant_model=llama_drafter)
    assert "\n" not in str(caught.value)


def test_pipeline_with_an_assistant_of_transformers_is_left_to_it(new_target, tokenizer):
    target, assistant = new_target("llama"), new_target("llama", num_hidden_layers=2)
    options = {"max_new_tokens": 12, "do_sample": False}
    plain = pipeline("text-generation", model=target, tokenizer=tokenizer)("Some text", **options)
    assisted = pipeline("text-generation", model=target, tokenizer=tokenizer, assistant_model=assistant)
    assert assisted("Some text", **options) == plain
    assistant.config.pad_token_id = 5
    with pytest.raises(ValueError, match="different tokenizer"):
        pipeline("text-generation", model=target, tokenizer=tokenizer, assistant_model=assistant)
