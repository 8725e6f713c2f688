"""Captured drafts are the drafts that are worked out step by step. Without a GPU a tape of operations stands for it."""

import copy
import gc
import logging
import pickle

import pytest
import torch
from lilicorr import LiLiCorrConfig, LiLiCorrModel
from lilicorr.modeling_lilicorr import draft_graphs
from lilicorr.modeling_lilicorr.draft_graphs import MAX_GRAPHS, KnownGraphs
from lilicorr.modeling_lilicorr.graphs import CudaGraph, graphs_asked_for
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from .tape import TapeGraph

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
BLOCK, DIM, VOCAB = 6, 32, 97
HEADS = {
    "none": ("none", {}),
    "lilicorr": ("lilicorr", {}),
    "residual": ("lilicorr", {"residual": True}),
    "dcoco": ("dcoco", {}),
    "domino": ("domino", {}),
    "dspark": ("dspark", {"markov_head_type": "rnn"}),
    "selector": ("selector", {}),
}
BACKBONES = {
    "eager": {"attention": "eager"},
    "sliding": {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9},
    "all sliding, eager": {"attention": "eager", "layer_types": ["sliding_attention"] * 2, "sliding_window": 7},
    "biased": {"attention_bias": True},
    "linear": {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
}


@pytest.fixture(scope="module")
def target():
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=DIM, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.35, bos_token_id=1, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval().to(DEVICE)


def drafter_for(target, head="lilicorr", attention="sdpa", **changes):
    torch.manual_seed(11)
    head_type, settings = HEADS[head]
    config = LiLiCorrConfig.for_target(
        target.config, head_type=head_type, num_hidden_layers=2, block_size=BLOCK, mask_token_id=0,
        target_layer_ids=[0, 1, 2], **changes,
    )  # fmt: skip
    config.head_config.update(settings)
    drafter = LiLiCorrModel._from_config(config, attn_implementation=attention).eval().to(DEVICE)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    drafter.graphs = KnownGraphs(Graph)
    return drafter


class Graph(CudaGraph if CUDA else TapeGraph):
    """What captures here; counts."""

    made = 0
    replays = 0

    def __init__(self, device):
        super().__init__(device)
        Graph.made += 1

    def replay(self):
        Graph.replays += 1
        super().replay()


@pytest.fixture(autouse=True)
def asked_for(monkeypatch):
    monkeypatch.setenv("LILICORR_GRAPHS", "1")
    monkeypatch.delenv("LILICORR_KERNELS", raising=False)
    monkeypatch.setattr(draft_graphs, "SMALLEST", 16)
    Graph.made = Graph.replays = 0
    with torch.no_grad():
        yield


class Sequence:
    """A text of random states that grows by `sizes` rows a block, drafted in whatever way `next` is told."""

    def __init__(self, target, drafter, sizes, seed=0):
        self.drafter, self.sizes, self.start, self.cache = drafter, list(sizes), 0, drafter.new_cache()
        self.embedding, self.lm_head = target.get_input_embeddings(), target.get_output_embeddings()
        self.generator = torch.Generator().manual_seed(seed)

    def next(self, draft, **options):
        size = self.sizes.pop(0)
        states = torch.randn(1, size, 3 * DIM, generator=self.generator).to(DEVICE)
        anchor = torch.randint(0, VOCAB, (1,), generator=self.generator).to(DEVICE)
        positions = torch.arange(self.start, self.start + size, device=DEVICE)[None]
        self.start += size
        return draft(anchor, states, positions, self.cache, self.embedding, self.lm_head, **options)

    def replayed(self, **options):
        graphs = self.drafter.graphs.of(self.drafter, self.embedding, self.lm_head)
        return self.next(self.drafter.draft, graphs=graphs, **options)

    def plain(self, **options):
        return self.next(self.drafter.draft, **options)


def assert_same(got, want):
    assert torch.equal(got.tokens, want.tokens) and torch.equal(got.finite, want.finite)
    torch.testing.assert_close(got.probabilities(), want.probabilities(), rtol=1e-3, atol=1e-5)


SIZES = [9, 1, 6, 3, 2, 6, 6, 4, 1, 1, 6, 5]  # a prompt, then what blocks commit; 50 rows


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


@pytest.fixture
def said(caplog):
    """Reasons that were told at debug level."""
    caplog.set_level(logging.DEBUG, logger=draft_graphs.logger.name)
    return lambda: [record.getMessage() for record in caplog.records if record.name == draft_graphs.logger.name]


def hooked(module):
    return module.register_forward_hook(lambda *_: None).remove


def before(module):
    return module.register_forward_pre_hook(lambda *_: None).remove


def training(module):
    module.train()
    return module.eval


def offloaded(module):
    module._hf_hook = None
    return lambda: delattr(module, "_hf_hook")


def of_its_own_kind(module):
    weight = module.weight
    module.weight = nn.Parameter(weight.detach(), requires_grad=False)
    module.weight.__class__ = type("Packed", (nn.Parameter,), {})
    return lambda: setattr(module, "weight", weight)


def spread(module):
    weight = module.weight
    module.weight = nn.Parameter(weight.detach().to("meta"), requires_grad=False)
    return lambda: setattr(module, "weight", weight)


CASES = [
    (hooked, "has a hook"), (before, "has a hook"), (offloaded, "has a hook"), (training, "in training mode"),
    (of_its_own_kind, "weights of the kind Packed"), (spread, "weights on meta"),
]  # fmt: skip


@pytest.mark.parametrize("change,reason", CASES)
def test_only_the_head_is_captured_where_lm_head_or_backbone_forbid_more(target, said, change, reason):
    drafter = drafter_for(target)
    embedding, lm_head = target.get_input_embeddings(), target.get_output_embeddings()
    for module in (lm_head, drafter.layers[1].mlp.down_proj):
        undo = change(module)
        graphs = drafter.graphs.of(drafter, embedding, lm_head)
        assert graphs is drafter.graphs.of(drafter, embedding, lm_head) and not graphs._whole
        undo()
        assert drafter.graphs.of(drafter, embedding, lm_head)._whole
    assert len(said()) <= 2 and all(f"{reason}" in each and "only the head" in each for each in said())


@pytest.mark.parametrize("change,reason", CASES)
def test_nothing_is_captured_where_head_or_embedding_forbid_it(target, said, change, reason):
    drafter = drafter_for(target)
    embedding, lm_head = target.get_input_embeddings(), target.get_output_embeddings()
    for module in (embedding, drafter.head.out_head):
        undo = change(module)
        assert drafter.graphs.of(drafter, embedding, lm_head) is drafter.graphs.of(drafter, embedding, lm_head) is None
        undo()
        assert drafter.graphs.of(drafter, embedding, lm_head) is not None
    assert 1 <= len(said()) <= 2 and all(reason in each for each in said())


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


@pytest.mark.parametrize(
    "changes,reason",
    [
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "dynamic rotary"),
        ({}, "flash_attention_2 attention"),
    ],
)
def test_a_backbone_that_needs_the_host_has_only_its_head_captured(target, said, changes, reason):
    drafter = drafter_for(target, **changes)
    if not changes:
        drafter.config._attn_implementation_internal = "flash_attention_2"
    assert not drafter.graphs.of(drafter, target.get_input_embeddings(), target.get_output_embeddings())._whole
    assert len(said()) == 1 and reason in said()[0]


def test_drafts_that_are_drawn_or_learn_or_stand_in_another_capture_are_worked_out(target, said, monkeypatch):
    drafter = drafter_for(target)
    one, other = (Sequence(target, drafter, [9] + [2] * 9) for _ in range(2))
    for sequence in (one, other):
        sequence.plain()
    for _ in range(2):
        assert_same(one.replayed(warp=lambda drafted, logits: logits), other.plain())
        with torch.enable_grad():
            assert one.replayed().probabilities().requires_grad
        with monkeypatch.context() as patch:
            patch.setattr(Graph, "capturing", staticmethod(lambda: True))
            one.replayed()
        for _ in range(2):
            other.plain()
        with torch.autocast(DEVICE, torch.bfloat16):
            assert_same(one.replayed(), other.plain())
        assert Graph.made == 0
    reasons = ("tokens are drawn", "gradients are on", "another capture", "autocast")
    assert len(said()) == 4 and all(reason in text for reason, text in zip(reasons, said(), strict=True))
    assert_same(one.replayed(), other.plain())
    assert Graph.made == 1


@pytest.mark.parametrize("whole", [True, False])
def test_a_capture_that_fails_is_not_tried_again_and_changes_nothing(target, said, whole):
    drafter = drafter_for(target)
    if not whole:
        hooked(drafter.norm)
    real = drafter.head.draft

    def reads(block, return_lattice=False):
        assert int(block.anchor_ids[0]) >= 0  # waits for the device
        return real(block, return_lattice)

    drafter.head.draft = reads
    one, other = (Sequence(target, drafter, SIZES) for _ in range(2))
    for _ in SIZES:
        assert_same(one.replayed(), other.plain())
    assert one.cache.length == other.cache.length == sum(SIZES)
    assert Graph.made == 1 and Graph.replays == 0
    assert sum("a capture failed" in text for text in said()) == 1 and len(said()) == 1 + (not whole)


def test_graphs_are_asked_for_by_one_variable(target, monkeypatch):
    drafter = drafter_for(target)
    modules = target.get_input_embeddings(), target.get_output_embeddings()
    for value, asked in (("1", True), ("0", False), ("", False), (None, False)):
        monkeypatch.delenv("LILICORR_GRAPHS", raising=False)
        if value is not None:
            monkeypatch.setenv("LILICORR_GRAPHS", value)
        assert graphs_asked_for() is asked
        assert (drafter.graphs.of(drafter, *modules) is not None) is asked
    monkeypatch.setenv("LILICORR_GRAPHS", "yes")
    with pytest.raises(ValueError, match=r"^LILICORR_GRAPHS is 'yes'; set it to 1 or 0, or unset it\.$"):
        drafter.graphs.of(drafter, *modules)


def test_cuda_graphs_refuse_other_devices_rocm_and_the_interpreter(monkeypatch):
    cuda = torch.device("cuda", 0)
    assert "the drafter is on cpu" in CudaGraph.refusal(torch.device("cpu"))
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert "interpreter" in CudaGraph.refusal(cuda)
    monkeypatch.delenv("TRITON_INTERPRET")
    assert CudaGraph.refusal(cuda) is None
    monkeypatch.setattr(torch.version, "cuda", None)
    assert CudaGraph.refusal(cuda) is not None


def test_copies_and_pickles_of_a_drafter_have_graphs_of_their_own(target):
    drafter = drafter_for(target)
    sequence = Sequence(target, drafter, [9, 2])
    for _ in range(2):
        sequence.replayed()
    assert len(pickle.loads(pickle.dumps(drafter.graphs))._by_head) == 0
    assert len(copy.deepcopy(drafter).graphs._by_head) == 0


def prompt(seed=0, length=9):
    return torch.randint(1, VOCAB, (1, length), generator=torch.Generator().manual_seed(seed)).to(DEVICE)


@pytest.mark.parametrize("head", HEADS)
def test_generate_says_the_same_and_replays_its_drafts(target, head):
    drafter = drafter_for(target, head)
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
    drafter = drafter_for(target)
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


@pytest.mark.skipif(CUDA, reason="needs a machine without a GPU")
def test_generate_with_the_variable_set_falls_back_without_a_gpu(target, said):
    drafter = drafter_for(target)
    drafter.graphs = KnownGraphs()
    for _ in range(2):
        plain = target.generate(prompt(), max_new_tokens=20, do_sample=False)
        assert torch.equal(plain, target.generate(prompt(), max_new_tokens=20, assistant_model=drafter))
    assert said() == [
        "A draft is not replayed as a captured graph: graphs need a CUDA device, and the drafter is on cpu."
    ]


def test_sampled_drafts_are_worked_out(target, said):
    drafter = drafter_for(target, "dspark", proposal="sampled")
    out = target.generate(prompt(), max_new_tokens=20, do_sample=True, assistant_model=drafter)
    assert out.shape == (1, 29) and Graph.made == 0 and "tokens are drawn" in said()[0]


@pytest.mark.skipif(not CUDA, reason="needs a GPU")
@pytest.mark.parametrize("kernels", ["reference", "auto"])
def test_on_a_gpu_in_half_precision(target, kernels, monkeypatch):
    monkeypatch.setenv("LILICORR_KERNELS", kernels)
    half = copy.deepcopy(target).bfloat16()
    drafter = drafter_for(half).bfloat16()
    out = half.generate(prompt(), max_new_tokens=60, do_sample=False, assistant_model=drafter)
    assert out.shape == (1, 69) and Graph.made > 0 and Graph.replays > 0
