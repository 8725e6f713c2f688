"""The same tokens as plain `generate`, in fp32 at temperature 0, whatever the drafter proposes."""

import pytest
import torch
from lilicorr.modeling_lilicorr.head_settings import default_head_config
from transformers import DynamicCache, GenerationConfig, LogitsProcessor

from .conftest import all_taken

PROCESSORS = [
    {"repetition_penalty": 1.3},
    {"no_repeat_ngram_size": 2},
    {"min_new_tokens": 12, "eos_token_id": 16},
    {"bad_words_ids": [[54], [33, 33]]},
    {"suppress_tokens": [10, 54]},
    {"forced_eos_token_id": 5},
]


class EveryThird(LogitsProcessor):
    """Keeps its own history and forbids the token of three steps ago; fails if ever shown a prefix that shrank to
    before what is committed.
    """

    def __init__(self):
        self.seen = []

    def __call__(self, input_ids, scores):
        self.seen.append(input_ids[0].tolist())
        scores = scores.clone()
        if input_ids.shape[1] >= 3:
            scores[:, input_ids[0, -3]] = -torch.inf
        return scores


@pytest.mark.parametrize("length", [1, 2, 17])
@pytest.mark.parametrize("new", [1, 2, 17])
def test_equal_to_plain_greedy(target, drafter, prompt, length, new):
    ids = prompt(length, seed=length)
    plain = target.generate(ids, max_new_tokens=new, do_sample=False)
    assisted = target.generate(ids, max_new_tokens=new, do_sample=False, assistant_model=drafter)
    assert torch.equal(assisted, plain)


@pytest.mark.parametrize(
    "head_type,changes",
    [("domino", {}), ("dcoco", {}), ("selector", {}), ("xpress", {})]
    + [("dspark", {"markov_head_type": kind}) for kind in ("vanilla", "gated", "rnn")],
)
def test_a_rivals_head_equals_plain_greedy(llama, new_drafter, prompt, head_type, changes):
    head_config = default_head_config(head_type, llama.config.hidden_size) | changes
    drafter = new_drafter(llama, head_type, head_config=head_config)
    with torch.no_grad():
        for parameter in drafter.head.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    for length, options in ((1, {}), (9, {}), (5, {"num_assistant_tokens": 3})):
        ids = prompt(length, seed=length)
        plain = llama.generate(ids, max_new_tokens=17, do_sample=False)
        assisted = llama.generate(ids, max_new_tokens=17, do_sample=False, assistant_model=drafter, **options)
        assert torch.equal(assisted, plain)
        assert drafter.last_generation.drafted > 0


@pytest.mark.parametrize("decoding", ["auto", "stock"])
@pytest.mark.parametrize("wrong_slots", [(), (0,), (3,), (6,)])
@pytest.mark.parametrize("length", [1, 6])
@pytest.mark.parametrize("new", [1, 2, 9, 33])
def test_good_drafts_are_accepted_and_change_nothing(
    llama, llama_drafter, teach, prompt, wrong_slots, length, new, decoding
):
    ids = prompt(length)
    plain = llama.generate(ids, max_new_tokens=new, do_sample=False)
    teach(llama_drafter, plain[0], wrong_slots)
    llama_drafter.config.decoding = decoding
    assisted = llama.generate(ids, max_new_tokens=new, do_sample=False, assistant_model=llama_drafter)
    assert torch.equal(assisted, plain)
    figures = llama_drafter.last_generation
    assert figures.committed == new
    if not wrong_slots and new > 2 and decoding == "stock":
        assert all_taken(figures)
    # 1 from the prompt's pass, then blocks that end at the wrong slot, or whole ones, until the limit.
    right = 1 + (wrong_slots[0] if wrong_slots else 7)
    chain = [right] * ((new - 1) // right) + [(new - 1) % right] * ((new - 1) % right > 0)
    if decoding == "stock":
        assert figures.committed_per_block == chain[: figures.blocks]  # nothing is drafted for a last token alone
        assert sum(figures.committed_per_block) + figures.plain_steps == new
    elif new > 2:
        assert figures.blocks <= len(chain) + 1  # with a branch of the text's a tree may hold a token less of the chain


@pytest.mark.parametrize("options", PROCESSORS, ids=lambda options: next(iter(options)))
def test_processors_act_as_in_plain_decoding(target, drafter, teach, prompt, options):
    ids = prompt(6)
    plain = target.generate(ids, max_new_tokens=30, do_sample=False, **options)
    for good in (False, True):
        if good:
            teach(drafter, plain[0])
        assisted = target.generate(ids, max_new_tokens=30, do_sample=False, assistant_model=drafter, **options)
        assert torch.equal(assisted, plain)
    assert drafter.last_generation.accepted > 0


@pytest.mark.parametrize("decoding", ["auto", "stock"])
def test_a_processor_sees_only_true_prefixes(llama, llama_drafter, teach, prompt, decoding):
    ids = prompt(4)
    plain = llama.generate(ids, max_new_tokens=24, do_sample=False, logits_processor=[EveryThird()])
    teach(llama_drafter, plain[0], wrong_slots=(4,))
    llama_drafter.config.decoding = decoding
    processor = EveryThird()
    assisted = llama.generate(
        ids, max_new_tokens=24, do_sample=False, logits_processor=[processor], assistant_model=llama_drafter
    )
    assert torch.equal(assisted, plain)
    assert llama_drafter.last_generation.accepted > 0
    # Rows before the first wrong draft are called with the true prefix; nothing is called while drafting.
    text = plain[0].tolist()
    assert all(prefix[:4] == text[:4] and len(prefix) <= len(text) for prefix in processor.seen)
    figures = llama_drafter.last_generation
    if decoding == "stock":
        assert len(processor.seen) == figures.plain_steps + figures.drafted + figures.blocks
    else:  # once a token, in order
        assert processor.seen == [text[:end] for end in range(4, 28)]


def test_second_call_with_a_shorter_prompt(target, drafter, prompt):
    for length in (20, 3, 1):
        ids = prompt(length, seed=length)
        plain = target.generate(ids, max_new_tokens=12, do_sample=False)
        assert torch.equal(target.generate(ids, max_new_tokens=12, do_sample=False, assistant_model=drafter), plain)
        assert drafter.last_generation.committed == 12


def test_left_padded_row_equals_the_unpadded(target, drafter, teach, prompt):
    ids = prompt(5)
    plain = target.generate(ids, max_new_tokens=25, do_sample=False)
    padded = torch.cat([torch.zeros(1, 7, dtype=torch.long), ids], dim=1)
    mask = (torch.arange(12) >= 7).long()[None]
    teach(drafter, plain[0])  # full acceptance only at the unpadded positions
    assisted = target.generate(padded, attention_mask=mask, max_new_tokens=25, do_sample=False, assistant_model=drafter)
    assert torch.equal(assisted[:, 7:], plain)
    assert all_taken(drafter.last_generation)


def test_padding_does_not_change_the_draft(llama, llama_drafter, prompt):
    ids = prompt(5)
    padded = torch.cat([torch.zeros(1, 7, dtype=torch.long), ids], dim=1)
    mask = (torch.arange(12) >= 7).long()[None]
    contexts = []
    original = type(llama_drafter).draft

    def spy(anchor, states, positions, *rest, **options):
        contexts.append((states, positions))
        return original(llama_drafter, anchor, states, positions, *rest, **options)

    llama_drafter.draft = spy
    for given, options in ((ids, {}), (padded, {"attention_mask": mask})):
        llama.generate(given, max_new_tokens=3, do_sample=False, assistant_model=llama_drafter, **options)
    (states, positions), (padded_states, padded_positions) = contexts[0], contexts[len(contexts) // 2]
    assert positions.tolist() == padded_positions.tolist() == [[0, 1, 2, 3, 4]]
    torch.testing.assert_close(states, padded_states, rtol=1e-4, atol=1e-4)


def test_nan_in_the_drafter_gives_no_candidates_and_the_right_output(target, drafter, prompt):
    drafter.config.lookup = False
    ids = prompt(6)
    plain = target.generate(ids, max_new_tokens=10, do_sample=False)
    torch.nn.init.constant_(drafter.norm.weight, float("nan"))
    assert torch.equal(target.generate(ids, max_new_tokens=10, do_sample=False, assistant_model=drafter), plain)
    assert drafter.last_generation.drafted == 0
    assert drafter.last_generation.blocks == 8  # the first and the last token come from passes without a draft
    assert drafter.last_generation.acceptance_length == 1.0


def test_nan_in_the_context_stays_harmless(target, drafter, prompt):
    drafter.config.lookup = False
    ids = prompt(6)
    plain = target.generate(ids, max_new_tokens=10, do_sample=False)
    torch.nn.init.constant_(drafter.fc.weight, float("nan"))
    assert torch.equal(target.generate(ids, max_new_tokens=10, do_sample=False, assistant_model=drafter), plain)
    assert drafter.last_generation.drafted == 0


def test_draft_is_cut_before_the_first_slot_that_is_not_finite(llama, llama_drafter, teach, prompt):
    llama_drafter.config.decoding = "stock"
    ids = prompt(6)
    plain = llama.generate(ids, max_new_tokens=16, do_sample=False)
    teach(llama_drafter, plain[0], broken_slots=(3, 5))
    assert torch.equal(llama.generate(ids, max_new_tokens=16, do_sample=False, assistant_model=llama_drafter), plain)
    assert llama_drafter.last_generation.drafted_per_block == [3, 3, 3, 2]  # commits 1, then 4 a block, 3 at the end


def test_seed_reproduces(target, drafter, prompt):
    ids = prompt(6)

    def sample(seed):
        torch.manual_seed(seed)
        return target.generate(ids, max_new_tokens=20, do_sample=True, top_k=0, assistant_model=drafter)[0].tolist()

    assert sample(3) == sample(3)
    assert sample(3) != sample(4)


def test_model_that_reads_no_list_of_states(llama, llama_drafter, teach, prompt, monkeypatch):
    ids = prompt(6)
    plain = llama.generate(ids, max_new_tokens=16, do_sample=False)
    monkeypatch.setattr("lilicorr.candidate_generator.target_parts.SELECTS_STATES", False)
    teach(llama_drafter, plain[0])
    assert torch.equal(llama.generate(ids, max_new_tokens=16, do_sample=False, assistant_model=llama_drafter), plain)
    assert llama_drafter.last_generation.acceptance_length > 7


def test_the_stock_loop_is_told_how_many_tokens_a_call_drafts_at_most(llama, llama_drafter, prompt):
    """Transformers keeps as many states of recurrent layers since 5.25, and an int is what it reads."""
    for asked, told in ((None, 7), (3, 3), (0, 1)):
        options = GenerationConfig(num_assistant_tokens=asked, max_length=9)
        cache = DynamicCache(config=llama.config)
        generator = llama_drafter.get_candidate_generator(
            llama, generation_config=options, model_kwargs={"past_key_values": cache}, input_ids=prompt(4)
        )
        assert generator.num_drafting_tokens == told
