"""A tiny target and drafters whose drafts are captured: on a GPU really, elsewhere on a tape."""

import logging

import pytest
import torch
from lilicorr import LiLiCorrConfig, LiLiCorrModel
from lilicorr.modeling_lilicorr import draft_graphs
from lilicorr.modeling_lilicorr.draft_graphs import KnownGraphs
from lilicorr.modeling_lilicorr.graphs import CudaGraph

from ..tiny import VOCAB, tiny_target
from .tape import TapeGraph

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
BLOCK, DIM = 6, 32
HEADS = {
    "none": ("none", {}),
    "lilicorr": ("lilicorr", {}),
    "residual": ("lilicorr", {"residual": True}),
    "longest path": ("lilicorr", {"walk": "longest"}),
    "dcoco": ("dcoco", {}),
    "domino": ("domino", {}),
    "dspark": ("dspark", {"markov_head_type": "rnn"}),
    "selector": ("selector", {}),
}
if CUDA:  # on a CPU it looks whether its passes agree, and a capture must not look
    HEADS["xpress"] = ("xpress", {})


@pytest.fixture(scope="session")
def target():
    return tiny_target().to(DEVICE)


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


@pytest.fixture
def asked_for(monkeypatch):
    monkeypatch.setenv("LILICORR_GRAPHS", "1")
    monkeypatch.delenv("LILICORR_KERNELS", raising=False)
    monkeypatch.setattr(draft_graphs, "SMALLEST", 16)
    Graph.made = Graph.replays = 0
    with torch.no_grad():
        yield


@pytest.fixture
def said(caplog):
    """Reasons that were told at debug level."""
    caplog.set_level(logging.DEBUG, logger=draft_graphs.logger.name)
    return lambda: [record.getMessage() for record in caplog.records if record.name == draft_graphs.logger.name]


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


def prompt(seed=0, length=9):
    return torch.randint(1, VOCAB, (1, length), generator=torch.Generator().manual_seed(seed)).to(DEVICE)
