"""What only a loop of our own gives: stops at the very token, batches, figures of a call."""

import threading
import time

import pytest
import torch
from transformers import DynamicCache, MaxTimeCriteria, StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer


class EndsAt(StoppingCriteria):
    """Ends each row once it has so many tokens."""

    def __init__(self, length):
        self.length, self.asked = length, []

    def __call__(self, input_ids, scores, **kwargs):
        self.asked.append(input_ids.shape[1])
        return torch.full((input_ids.shape[0],), input_ids.shape[1] >= self.length)


@pytest.mark.parametrize("stop", [9, 12, 16, 21])
def test_a_criterion_fulfilled_inside_a_block_ends_the_text_there(llama, llama_drafter, teach, prompt, stop):
    ids = prompt(6)
    whole = llama.generate(ids, max_new_tokens=30, do_sample=False)
    teach(llama_drafter, whole[0])
    criterion = EndsAt(stop)
    given = {"max_new_tokens": 30, "do_sample": False, "stopping_criteria": StoppingCriteriaList([criterion])}
    out = llama.generate(ids, assistant_model=llama_drafter, **given)
    assert torch.equal(out, whole[:, :stop])
    assert criterion.asked == list(range(7, stop + 1))  # once a token, in order


def test_stop_strings_end_where_plain_generate_ends(llama, llama_drafter, teach, prompt, tokenizer):
    ids = prompt(6)
    whole = llama.generate(ids, max_new_tokens=40, do_sample=False)
    teach(llama_drafter, whole[0])
    text = tokenizer.decode(whole[0, 6:])
    ended = set()
    for start in range(3, 30, 4):
        options = {
            "max_new_tokens": 40,
            "do_sample": False,
            "stop_strings": [text[start : start + 2]],
            "tokenizer": tokenizer,
        }
        plain = llama.generate(ids, **options)
        assert torch.equal(llama.generate(ids, assistant_model=llama_drafter, **options), plain)
        ended.add(plain.shape[1])
    assert len(ended) > 3 and max(ended) < 46


def test_a_time_limit_ends_a_text(llama, llama_drafter, prompt):
    late = MaxTimeCriteria(max_time=0.05, initial_timestamp=time.time() - 1)
    out = llama.generate(
        prompt(6), max_new_tokens=40, do_sample=False, assistant_model=llama_drafter,
        stopping_criteria=StoppingCriteriaList([late]),
    )  # fmt: skip
    assert out.shape[1] == 7


class Collector(BaseStreamer):
    def __init__(self):
        self.tokens, self.ended = [], False

    def put(self, value):
        self.tokens += value.reshape(-1).tolist()

    def end(self):
        self.ended = True


def test_a_streamer_gets_every_token(llama, llama_drafter, teach, prompt):
    plain = llama.generate(prompt(6), max_new_tokens=20, do_sample=False)
    teach(llama_drafter, plain[0], wrong_slots=(2,))
    streamer = Collector()
    llama.generate(prompt(6), max_new_tokens=20, do_sample=False, assistant_model=llama_drafter, streamer=streamer)
    assert streamer.tokens == plain[0].tolist() and streamer.ended


@pytest.mark.parametrize("rows", [2, 5, 16])
@pytest.mark.parametrize("ends", [None, [5, 9, 20, 33]])
def test_batches_of_ragged_prompts_and_stops(target, drafter, rows, ends):
    generator = torch.Generator().manual_seed(rows)
    ids = torch.randint(1, 97, (rows, 14), generator=generator)
    mask = torch.arange(14) >= torch.randint(0, 14, (rows, 1), generator=generator)
    options = {
        "attention_mask": mask.long(),
        "max_new_tokens": 40,
        "do_sample": False,
        "eos_token_id": ends,
        "pad_token_id": 0,
    }
    plain = target.generate(ids, **options)
    assert torch.equal(target.generate(ids, assistant_model=drafter, **options), plain)
    assert len(drafter.last_generation.rows) == rows
    if ends:
        assert len({each.committed for each in drafter.last_generation.rows}) > 1


def test_a_tree_never_accepts_less_than_the_chain_it_contains(llama, new_drafter, teach, prompt):
    ids = prompt(6)
    plain = llama.generate(ids, max_new_tokens=60, do_sample=False)
    committed = {}
    for nodes, lookup in ((7, False), (31, False), (31, True)):
        drafter = teach(
            new_drafter(llama, "lilicorr", max_nodes=nodes, lookup=lookup), plain[0], wrong_slots=(2,), spare=True
        )
        assert torch.equal(llama.generate(ids, max_new_tokens=60, do_sample=False, assistant_model=drafter), plain)
        committed[nodes, lookup] = drafter.last_generation.acceptance_length
    assert committed[31, False] >= committed[7, False] > 2 and committed[31, True] >= committed[7, False]


def test_an_accepted_end_token_counts_as_accepted(llama, llama_drafter, teach, prompt):
    ids = prompt(6)
    new = llama.generate(ids, max_new_tokens=30, do_sample=False)[0, 6:].tolist()
    end = next(i for i in range(4, 8) if new[i] not in new[:i])
    teach(llama_drafter, torch.tensor([*ids[0].tolist(), *new]))
    llama_drafter.config.lookup = False
    llama.generate(
        ids, max_new_tokens=30, do_sample=False, eos_token_id=new[end], pad_token_id=0, assistant_model=llama_drafter
    )
    figures = llama_drafter.last_generation
    assert figures.committed == end + 1 and figures.accepted == figures.committed_per_block[0] == end


def test_figures_belong_to_their_thread_and_to_the_output(llama, llama_drafter, prompt):
    found = {}

    def call(new):
        out = llama.generate(
            prompt(4, seed=new), max_new_tokens=new, do_sample=False, assistant_model=llama_drafter,
            return_dict_in_generate=True,
        )  # fmt: skip
        found[new] = (llama_drafter.last_generation.committed, out.figures.committed)

    threads = [threading.Thread(target=call, args=(new,)) for new in range(8, 20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {new: (new, new) for new in range(8, 20)}


def test_a_cache_that_is_longer_than_the_prompt_is_refused(llama, llama_drafter, prompt):
    cache = DynamicCache(config=llama.config)
    llama(prompt(12), past_key_values=cache)
    with pytest.raises(ValueError, match="holds 12 tokens and the prompt has 9; give the whole conversation"):
        llama.generate(prompt(9), past_key_values=cache, max_new_tokens=4, assistant_model=llama_drafter)


@pytest.mark.parametrize("decoding", ["auto", "stock"])
def test_fp16_that_overflows_is_told_once_with_what_to_do(llama, new_drafter, prompt, monkeypatch, decoding):
    told = []
    monkeypatch.setattr("lilicorr.candidate_generator.requests.logger.warning_once", told.append)
    drafter = new_drafter(llama, "none", decoding=decoding).half()
    torch.nn.init.constant_(drafter.norm.weight, 6e4)
    plain = llama.generate(prompt(6), max_new_tokens=8, do_sample=False)
    assert torch.equal(llama.generate(prompt(6), max_new_tokens=8, do_sample=False, assistant_model=drafter), plain)
    assert "overflow in fp16" in told[0] and "dtype=torch.bfloat16 or torch.float32" in told[0]
    told.clear()
    sound = new_drafter(llama, "none", decoding=decoding)
    llama.generate(prompt(6), max_new_tokens=8, do_sample=False, assistant_model=sound)
    assert told == []


@pytest.mark.parametrize("nodes", [1, 3, 7, 20])
def test_a_draft_is_no_longer_than_its_tree_can_be_deep(llama, new_drafter, prompt, monkeypatch, nodes):
    drafter, asked = new_drafter(llama, "lilicorr", max_nodes=nodes, lookup=False), []
    draft = drafter.draft
    monkeypatch.setattr(
        drafter, "draft", lambda *given, **more: asked.append(more["num_slots"]) or draft(*given, **more)
    )
    llama.generate(prompt(6), max_new_tokens=40, do_sample=False, assistant_model=drafter)
    assert asked[0] == min(nodes, drafter.config.num_slots) and set(asked) == {asked[0]}


def test_few_rows_are_multiplied_the_other_way_round_while_a_tree_is_drafted_and_verified(
    llama, llama_drafter, prompt, monkeypatch
):
    taken = []

    def noted(layer, x):
        taken.append((layer, x.shape[1]))
        return torch.nn.functional.linear(x, layer.weight, layer.bias)

    monkeypatch.setattr("lilicorr.kernels.few_rows.multiplies_few_rows", lambda: True)
    monkeypatch.setattr("lilicorr.kernels.few_rows.few_rows_linear", noted)
    plain = llama.generate(prompt(9), max_new_tokens=12, do_sample=False)
    assert not taken
    ours = llama.generate(prompt(9), max_new_tokens=12, do_sample=False, assistant_model=llama_drafter)
    assert torch.equal(ours, plain)
    layers = {layer for layer, _ in taken}
    assert llama.lm_head in layers and llama_drafter.fc in layers
    assert 9 not in {rows for layer, rows in taken if layer is llama.lm_head or layer in set(llama.model.modules())}
    assert all("forward" not in vars(layer) for layer in layers)
