"""Captured drafts are the drafts that are computed step by step. Without a GPU a tape of operations stands for it."""

import copy
import gc
import pickle

import pytest
import torch
from lilicorr.modeling_lilicorr import draft_graphs
from lilicorr.modeling_lilicorr.draft_graphs import MAX_GRAPHS, KnownGraphs
from lilicorr.modeling_lilicorr.graphs import CudaGraph

from .conftest import BLOCK, CUDA, DEVICE, HEADS, SIZES, Graph, Sequence, assert_same, drafter_for, prompt
from .tape import TapeGraph

pytestmark = pytest.mark.usefixtures("asked_for")
BACKBONES = {
    "eager": {"attention": "eager"},
    "sliding": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9},
    "all sliding, eager": {"attention": "eager", "layer_types": ["sliding_attention"] * 2, "sliding_window": 7},
    "biased": {"attention_bias": True},
    "convolved": {"conv_kernel_size": 3, "conv_group_size": 8},
    "linear": {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
}


@pytest.mark.parametrize("head", HEADS)
def test_every_heads_drafts_are_the_plain_ones_while_the_context_grows(target, head):
    drafter = drafter_for(target, head)
    first, second = (Sequence(target, drafter, SIZES) for _ in range(2))
    for _ in SIZES:
        assert_same(first.replayed(), second.plain())
    assert first.cache.length == second.cache.length == sum(SIZES)
    assert Graph.made == 3 and Graph.replays == len(SIZES) - 1  # capacities 16, 32 and 64; the prompt is not replayed
    assert torch.equal(first.cache.positions, second.cache.positions)
    for got, want in zip(first.cache.rows()[0], second.cache.rows()[0], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("backbone", BACKBONES)
def test_every_backbones_drafts_are_the_plain_ones(target, backbone):
    drafter = drafter_for(target, **BACKBONES[backbone])
    first, second = (Sequence(target, drafter, SIZES) for _ in range(2))
    for _ in SIZES:
        assert_same(first.replayed(), second.plain())
    assert Graph.replays == len(SIZES) - 1


def test_results_stay_what_they_were_when_the_next_ones_come(target):
    sequence = Sequence(target, drafter_for(target), [9, 2, 3, 4])
    drafts = [sequence.replayed() for _ in range(4)]
    again = Sequence(target, sequence.drafter, [9, 2, 3, 4])
    for draft in drafts:
        assert_same(draft, again.plain())


def test_sequences_take_turns_in_one_context_and_steps_without_a_graph_come_between(target):
    drafter = drafter_for(target)
    rows = [[9, 2, 5, 1, 6, 6, 3], [12, 1, 1, 6, 2, 2, 6]]
    pairs = [[Sequence(target, drafter, sizes, seed) for _ in range(2)] for seed, sizes in enumerate(rows)]
    for step in range(7):
        for number, (one, other) in enumerate(pairs):
            want = other.plain()
            if step == 3 + number:
                assert_same(one.plain(), want)
            else:
                assert_same(one.replayed(), want)
    assert Graph.made == 3  # capacities 16, 32 and 64
    assert all(one.cache.length == other.cache.length for one, other in pairs)


def test_a_copy_of_a_context_goes_its_own_way(target):
    drafter = drafter_for(target)
    one, other = (Sequence(target, drafter, [9, 3, 2, 4, 4]) for _ in range(2))
    for sequence in (one, other):
        sequence.replayed()
        sequence.replayed()
    kept, one.cache = one.cache, copy.deepcopy(one.cache)
    assert one.cache.length == 12 and one.cache.positions.shape == (1, 12)
    assert_same(one.replayed(), other.plain())
    assert kept.length == 12 and torch.equal(kept.positions, torch.arange(12, device=DEVICE)[None])
    assert_same(one.replayed(), other.plain())


def test_the_context_of_a_sequence_that_is_gone_is_taken_by_the_next(target):
    drafter = drafter_for(target)
    for seed in range(3):
        one, other = (Sequence(target, drafter, [9, 3, 2], seed) for _ in range(2))
        for _ in range(3):
            assert_same(one.replayed(), other.plain())
        del one
        gc.collect()
    assert Graph.made == 2  # capacities 16 and 32


def test_another_number_of_slots_or_candidates_is_another_graph(target):
    drafter = drafter_for(target)
    one, other = (Sequence(target, drafter, [9] + [2] * 5) for _ in range(2))
    made = []
    for options in ({}, {}, {"num_slots": 2}, {"num_slots": 2}, {}):
        draft = one.replayed(**options)
        assert_same(draft, other.plain(**options))
        assert draft.tokens.shape == (1, options.get("num_slots", BLOCK - 1))
        made.append(Graph.made)
    assert made == [0, 1, 2, 2, 3]  # the last one's context is larger
    drafter.head.num_candidates = 3
    assert_same(one.replayed(), other.plain())
    assert Graph.made == 4


def test_the_number_of_graphs_is_bounded(target, monkeypatch):
    drafter = drafter_for(target)
    monkeypatch.setattr(draft_graphs, "MAX_GRAPHS", 2)
    monkeypatch.setattr(draft_graphs, "SMALLEST", 256)
    one, other = (Sequence(target, drafter, [9] + [1] * 8) for _ in range(2))
    graphs = drafter.graphs.of(drafter, one.embedding, one.lm_head)
    for slots in (5, 1, 2, 3, 1, 3, 1, 2, 1):
        assert_same(one.replayed(num_slots=slots), other.plain(num_slots=slots))
        assert len(graphs) <= 2
    assert Graph.made == 5 and MAX_GRAPHS > 2  # 1 2 3, again 1, 2 again; what was used last stays


def test_weights_changed_in_place_are_seen_and_weights_laid_elsewhere_are_captured_anew(target):
    drafter = drafter_for(target)
    one, other = (Sequence(target, drafter, [9] + [2] * 6) for _ in range(2))
    for _ in range(3):
        assert_same(one.replayed(), other.plain())
    for parameter in drafter.parameters():
        parameter.mul_(0.7)
    assert_same(one.replayed(), other.plain())
    assert Graph.made == 2  # capacities 16 and 32
    graphs = drafter.graphs.of(drafter, one.embedding, one.lm_head)
    assert graphs is drafter.graphs.of(drafter, one.embedding, one.lm_head)
    drafter.fc.weight.data = drafter.fc.weight * -1.3
    assert graphs is not drafter.graphs.of(drafter, one.embedding, one.lm_head)
    assert_same(one.replayed(), other.plain())
    assert Graph.made == 3


def test_a_bad_state_spoils_its_own_draft_only(target):
    drafter = drafter_for(target)
    one = Sequence(target, drafter, [9, 5])
    graphs = drafter.graphs.of(drafter, one.embedding, one.lm_head)

    def poisoned(anchor, states, *rest, **options):
        return graphs.draft(drafter, anchor, states * torch.nan, *rest, **options)

    one.replayed()
    assert not one.next(poisoned).finite.any()
    fresh, plain = (Sequence(target, drafter, [3, 2, 3], seed=5) for _ in range(2))
    for _ in range(3):
        assert_same(fresh.replayed(), plain.plain())
    assert Graph.made == 1  # its columns 9 to 13 had held NaN, and nothing is written there


def test_a_lattice_is_worked_out_and_shows_what_a_graph_commits(target):
    drafter = drafter_for(target, "residual")
    one, other = (Sequence(target, drafter, [9, 3, 2]) for _ in range(2))
    for _ in range(3):
        draft = other.replayed(return_lattice=True)
        assert torch.equal(draft.lattice.candidates.gather(-1, draft.lattice.picks[..., None])[..., 0], draft.tokens)
        assert_same(one.replayed(), draft)
    assert Graph.made == 2


def test_inference_mode_may_come_and_go(target):
    drafter = drafter_for(target)
    one, other = (Sequence(target, drafter, [9] + [3] * 8) for _ in range(2))
    for step in range(9):
        want = other.plain()
        with torch.inference_mode(step in (1, 2, 4, 7)):
            assert_same(one.plain() if step in (4, 5, 6) else one.replayed(), want)


@pytest.mark.parametrize("head", HEADS)
def test_a_captured_head_behind_a_hooked_lm_head(target, head):
    drafter = drafter_for(target, head)
    seen = []
    handle = target.get_output_embeddings().register_forward_hook(lambda *_: seen.append(1))
    first, second = (Sequence(target, drafter, SIZES) for _ in range(2))
    for _ in SIZES:
        assert_same(first.replayed(), second.plain())
    handle.remove()
    assert Graph.made == 1 and Graph.replays == len(SIZES) and len(seen) >= 2 * len(SIZES)
    assert first.cache.length == second.cache.length == sum(SIZES)


def test_copies_and_pickles_of_a_drafter_have_graphs_of_their_own(target):
    drafter = drafter_for(target)
    sequence = Sequence(target, drafter, [9, 2])
    for _ in range(2):
        sequence.replayed()
    assert len(pickle.loads(pickle.dumps(drafter.graphs))._by_head) == 0
    assert len(copy.deepcopy(drafter).graphs._by_head) == 0


@pytest.mark.parametrize("head", HEADS)
def test_generate_says_the_same_and_replays_its_drafts(target, head):
    drafter = drafter_for(target, head, decoding="stock")  # trees ask for lattices, which are not captured
    for seed in range(2):
        options = {"max_new_tokens": 40, "do_sample": False}
        plain = target.generate(prompt(seed), **options)
        drafter.graphs, kept = KnownGraphs(TapeGraph if not CUDA else CudaGraph), drafter.graphs
        assert torch.equal(plain, target.generate(prompt(seed), **options, assistant_model=drafter))
        drafter.graphs, Graph.replays = kept, 0
        assert torch.equal(plain, target.generate(prompt(seed), **options, assistant_model=drafter))
        assert Graph.replays == drafter.last_generation.blocks - 1
    assert Graph.made == 3  # capacities; the second call captures nothing


def test_generate_goes_on_in_a_chat_and_between_chats(target):
    drafter = drafter_for(target, decoding="stock")
    drafts = {}
    for way in ("replayed", "plain"):
        drafter.graphs = KnownGraphs(Graph) if way == "replayed" else KnownGraphs(CudaGraph)
        chats = [target.generate(prompt(seed), max_new_tokens=12, return_dict_in_generate=True,
                                 do_sample=False, assistant_model=drafter) for seed in range(2)]  # fmt: skip
        for chat in chats:
            longer = torch.cat([chat.sequences, prompt(9, 4)], dim=1)
            target.generate(longer, past_key_values=chat.past_key_values, max_new_tokens=14, do_sample=False,
                            assistant_model=drafter)  # fmt: skip
            drafts.setdefault(way, []).append(drafter.last_generation.committed_per_block)
    assert drafts["replayed"] == drafts["plain"] and (CUDA or Graph.replays > 0)


@pytest.mark.skipif(not CUDA, reason="needs a GPU")
@pytest.mark.parametrize("kernels", ["reference", "auto"])
def test_on_a_gpu_in_half_precision(target, kernels, monkeypatch):
    monkeypatch.setenv("LILICORR_KERNELS", kernels)
    half = copy.deepcopy(target).bfloat16()
    drafter = drafter_for(half).bfloat16()
    out = half.generate(prompt(), max_new_tokens=60, do_sample=False, assistant_model=drafter)
    assert out.shape == (1, 69) and Graph.made > 0 and Graph.replays > 0
