"""At temperature 1 assisted sampling draws from the target's own distribution (χ², seeded), and wrong rules are caught.

The target's attention is switched off, so its next token depends on the last one only, and every conditional
distribution can be written down from one table, also under top-p and a repetition penalty. A cell of the test is
(what the next token may depend on, and the token before it, next token): it also sees dependence where none may be.
"""

from collections import Counter, defaultdict

import pytest
import torch
from lilicorr.candidate_generator.decoding_row import DecodingRow
from lilicorr.candidate_generator.lilicorr_generator import LiLiCorrCandidateGenerator
from lilicorr.modeling_lilicorr.head_settings import default_head_config
from lilicorr.modeling_lilicorr.lattice import Draft, Lattice
from scipy.stats import chi2
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

WORDS = 7
DRAWS = 6_000
ALPHA = 1e-3
TINY = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "initializer_range": 0.6,
}


@pytest.fixture
def target(new_target):
    target = new_target("llama", **TINY)
    for layer in target.model.layers:
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
    target.lm_head.weight.data *= 0.4  # logits of standard deviation 1: no token is nearly certain
    return target


@pytest.fixture
def table(target):
    """Logits of the next token after each token, `[WORDS, WORDS]`."""
    with torch.no_grad():
        return target(torch.arange(WORDS)[:, None]).logits[:, -1].float()


@pytest.fixture
def drafter(target, table, new_drafter):
    """Follows the most likely successors, so that drafts are accepted often and rejected often."""
    drafter = new_drafter(target, "none", num_hidden_layers=1, block_size=5, target_layer_ids=[0])
    successor = table.argmax(-1).tolist()

    def draft(anchor_ids, *arguments, **options):
        tokens = [successor[int(anchor_ids)]]
        while len(tokens) < drafter.config.num_slots:
            tokens.append(successor[tokens[-1]])
        finite = torch.ones(1, len(tokens), dtype=torch.bool)
        return Draft(torch.tensor([tokens]), finite, lambda: torch.ones(1, len(tokens)))

    drafter.draft = draft
    return drafter


def p_value(target, drafter, table, new, processors=(), draws=DRAWS, by_prefix=True, **options):
    """χ² of at least `draws` tokens, in texts of `new` tokens, against the exact conditional distributions."""
    torch.manual_seed(0)
    prompt = torch.tensor([[1, 2]])
    processors = LogitsProcessorList(processors)
    counts, expected = Counter(), defaultdict(float)
    exact = {}
    texts = -(-draws // new)
    for _ in range(texts):
        given = {"max_new_tokens": new, "do_sample": True, "assistant_model": drafter, "top_k": 0} | options
        text = target.generate(prompt, **given)[0].tolist()
        for end in range(2, len(text)):
            context = (text[end - 1], frozenset(text[:end]) if processors and by_prefix else None)
            if context not in exact:
                scores = processors(torch.tensor([text[:end]]), table[text[end - 1]][None].clone())
                exact[context] = scores.softmax(-1)[0].tolist()
            row = (context, text[end - 2])
            counts[(*row, text[end])] += 1
            for token, probability in enumerate(exact[context]):
                expected[(*row, token)] += probability
    assert sum(counts.values()) >= draws
    assert all(expected[cell] > 0 for cell in counts), "a token of probability zero was drawn"
    return chi_square(counts, expected)


def chi_square(counts, expected):
    """Rows of a context with too few draws and rare tokens within a row are pooled (all expectations >= 5)."""
    rows = defaultdict(list)
    for cell, mean in expected.items():
        rows[cell[:-1]].append((mean, counts[cell]))
    statistic, freedom = 0.0, 0
    for cells in rows.values():
        cells = [cell for cell in cells if cell[0] > 0]
        common = [cell for cell in cells if cell[0] >= 5]
        rare = [cell for cell in cells if cell[0] < 5]
        pooled = [(sum(mean for mean, _ in rare), sum(count for _, count in rare))] if rare else []
        if pooled and pooled[0][0] < 5:
            if not common:
                continue
            common.sort()
            pooled = [(pooled[0][0] + common[0][0], pooled[0][1] + common[0][1])]
            common = common[1:]
        cells = common + pooled
        statistic += sum((count - mean) ** 2 / mean for mean, count in cells)
        freedom += len(cells) - 1
    assert freedom > 20
    return float(chi2.sf(statistic, freedom))


BOTH = pytest.mark.parametrize("decoding", ["auto", "stock"])


@BOTH
def test_temperature_one_is_the_targets_distribution(target, drafter, table, decoding):
    drafter.config.decoding = decoding
    assert p_value(target, drafter, table, new=200) > ALPHA
    assert 1.5 < drafter.last_generation.acceptance_length < 5.5


def test_trees_with_branches_leave_the_targets_distribution(target, drafter, table):
    """Two candidates a slot by the table, and what the text went on with before."""
    best = table.log_softmax(-1).topk(2)

    def draft(anchor_ids, *arguments, **options):
        slots, token = [], anchor_ids
        for _ in range(drafter.config.num_slots):
            slots.append((best.indices[token], best.values[token]))
            token = best.indices[token][:, 0]
        candidates, log_probs = (torch.stack(parts, dim=1) for parts in zip(*slots, strict=True))
        finite = torch.ones(candidates.shape[:2], dtype=torch.bool)
        lattice = Lattice(candidates, log_probs, None, None, torch.zeros_like(candidates[..., 0]))
        return Draft(candidates[..., 0], finite, lambda: log_probs[..., 0].exp(), lattice)

    drafter.draft = draft
    assert p_value(target, drafter, table, new=200, draws=5_000) > ALPHA
    figures = drafter.last_generation
    assert figures.acceptance_length > 2 and set(figures.accepted_by_source) == {"lattice", "text", "both"}


def test_temperature_and_top_k(target, drafter, table):
    warpers = [TemperatureLogitsWarper(0.7), TopKLogitsWarper(4)]
    options = {"temperature": 0.7, "top_k": 4}
    assert p_value(target, drafter, table, 200, warpers, draws=4_000, by_prefix=False, **options) > ALPHA


def test_a_loop_that_keeps_what_was_drafted_too_often_is_caught(target, drafter, table, monkeypatch):
    right = DecodingRow.choose
    monkeypatch.setattr(DecodingRow, "choose", lambda self, logits: right(self, 1.3 * logits))
    assert p_value(target, drafter, table, new=200, draws=3_000) < 1e-6


@BOTH
def test_top_p_and_repetition_penalty(target, drafter, table, decoding):
    drafter.config.decoding = decoding
    processors = [RepetitionPenaltyLogitsProcessor(1.4), TopPLogitsWarper(0.8)]
    assert p_value(target, drafter, table, 40, processors, top_p=0.8, repetition_penalty=1.4) > ALPHA


@pytest.mark.parametrize("believed", [0.0, 2.0])
def test_a_wrong_acceptance_rule_of_the_stock_loop_is_rejected(target, drafter, table, monkeypatch, believed):
    """A returned distribution that the draft was not drawn from (uniform, or too sharp) makes the ratio test wrong."""
    drafter.config.decoding = "stock"
    right = LiLiCorrCandidateGenerator.get_candidates

    def wrong(self, input_ids, *arguments, **kwargs):
        candidates, _ = right(self, input_ids, *arguments, **kwargs)
        if candidates.shape[1] == input_ids.shape[1]:
            return candidates, None
        return candidates, believed * table[candidates[0, input_ids.shape[1] - 1 : -1]][None]

    monkeypatch.setattr(LiLiCorrCandidateGenerator, "get_candidates", wrong)
    assert p_value(target, drafter, table, new=200, draws=3_000) < 1e-9


@pytest.fixture
def drawing(target, table, new_drafter):
    """A DSpark drafter that knows most of the table and draws its tokens."""
    head = {
        "markov_rank": 8,
        "markov_head_type": "vanilla",
        "enable_confidence_head": False,
        "confidence_head_with_markov": False,
    }
    drafter = new_drafter(
        target, "dspark", num_hidden_layers=1, block_size=5, target_layer_ids=[0], head_config=head, proposal="sampled"
    )
    markov = drafter.head.markov_head
    with torch.no_grad():
        markov.markov_w1.weight.copy_(torch.eye(WORDS, 8))
        markov.markov_w2.weight.copy_(torch.nn.functional.pad(table.T, (0, 1)))
    return drafter


def test_a_sampled_proposal_leaves_the_targets_distribution(target, drawing, table):
    assert p_value(target, drawing, table, new=200) > ALPHA
    drawn = drawing.last_generation.acceptance_length
    drawing.config.proposal = "point"
    assert p_value(target, drawing, table, new=200, draws=3_000) > ALPHA
    # Two close distributions agree more often than one of them and its own likeliest token.
    assert drawn > drawing.last_generation.acceptance_length + 0.5


@pytest.mark.parametrize("head_type", ["selector", "dcoco", "lilicorr"])
def test_a_path_drawn_from_scores_leaves_the_targets_distribution(target, table, new_drafter, head_type):
    drafter = new_drafter(
        target, head_type, num_hidden_layers=1, block_size=5, target_layer_ids=[0], proposal="sampled",
        head_config=default_head_config(head_type, 16) | {"num_candidates": 4},
    )  # fmt: skip
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    assert p_value(target, drafter, table, new=200, draws=3_000) > ALPHA
    assert drafter.last_generation.accepted > 0


def test_a_sampled_proposal_is_warped_as_the_target_is(target, drawing, table):
    processors = [RepetitionPenaltyLogitsProcessor(1.4), TopPLogitsWarper(0.8)]
    assert p_value(target, drawing, table, 40, processors, top_p=0.8, repetition_penalty=1.4) > ALPHA
    assert drawing.last_generation.acceptance_length > 1.5


def test_a_proposal_drawn_from_other_logits_is_caught(target, drawing, table, monkeypatch):
    right = LiLiCorrCandidateGenerator._all_rows
    monkeypatch.setattr(LiLiCorrCandidateGenerator, "_all_rows", lambda *given: _halved(right(*given)))
    assert p_value(target, drawing, table, new=200, draws=3_000) < 1e-6


def _halved(logits):
    return None if logits is None else logits / 2


def test_a_sampled_proposal_is_greedy_where_decoding_is(target, drawing):
    prompt = torch.tensor([[1, 2]])
    plain = target.generate(prompt, max_new_tokens=30, do_sample=False)
    assert torch.equal(target.generate(prompt, max_new_tokens=30, do_sample=False, assistant_model=drawing), plain)
