"""Tiny seeded targets and drafters, and a way to make a drafter as good or as bad as a test needs."""

import itertools
import types
from dataclasses import replace

import pytest
import torch
from lilicorr import LiLiCorrModel
from lilicorr.modeling_lilicorr.batch_draft_cache import BatchDraftCache
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from ..tiny import VOCAB, tiny_drafter_for
from ..tiny import tiny_target as build_target


def build_drafter(target, head_type, **overrides):
    """Trees of seven nodes, whatever the machine would choose."""
    return tiny_drafter_for(target, head_type, **{"max_nodes": 7} | overrides)


def teach_drafter(drafter, texts, wrong_slots=(), broken_slots=(), sure=0.9, spare=False):
    """Make `drafter` propose what follows in its text after the position it believes to be at.

    Full acceptance therefore also shows that its positions are right. The real draft still runs, caches and all.

    Args:
        texts: ids without padding, or a list of such, one a row of a batch.
        wrong_slots: get another token; broken_slots: are reported as not finite.
        sure: the probability that it gives each of its tokens, in draft and lattice.
        spare: whether the right token of a wrong slot is the second candidate there.
    """
    texts = [[int(token) for token in text] for text in (texts if isinstance(texts, list) else [texts])]
    started = itertools.count()

    def new_cache(self):
        cache = LiLiCorrModel.new_cache(self)
        cache.taught = [next(started)]
        return cache

    def new_batch_cache(self):
        return FollowedCache(self.config.num_hidden_layers, self.device)

    def draft(self, anchor_ids, states, positions, cache, *rest, **kwargs):
        real = LiLiCorrModel.draft(self, anchor_ids, states, positions, cache, *rest, **kwargs)
        tokens, spares, finite = real.tokens.clone(), real.tokens.clone(), real.finite.clone()
        starts = (cache.newest(positions) + 2).tolist()
        for row, (start, number) in enumerate(zip(starts, getattr(cache, "taught", [0]), strict=True)):
            follows = texts[number % len(texts)][start : start + tokens.shape[1]] if texts else []
            tokens[row, : len(follows)] = torch.tensor(follows, dtype=torch.long)
        spares[:] = (tokens + 2) % self.config.vocab_size
        for slot in set(wrong_slots) & set(range(tokens.shape[1])):
            if spare:
                spares[:, slot] = tokens[:, slot]
            tokens[:, slot] = (tokens[:, slot] + 1) % self.config.vocab_size
        for slot in set(broken_slots) & set(range(tokens.shape[1])):
            finite[:, slot] = False
        lattice = taught_lattice(real.lattice, tokens, spares, sure, self.head.tree_beta)
        chances = torch.full(tokens.shape, sure)
        return replace(real, tokens=tokens, finite=finite, probabilities=lambda: chances, lattice=lattice)

    for method in (draft, new_cache, new_batch_cache):
        setattr(drafter, method.__name__, types.MethodType(method, drafter))
    return drafter


class FollowedCache(BatchDraftCache):
    """Knows which of a batch's sequences its rows are, also once some have left."""

    def __init__(self, *args):
        super().__init__(*args)
        self.taught, self._started = [], itertools.count()

    def add_row(self):
        super().add_row()
        self.taught.append(next(self._started))

    def keep(self, rows):
        super().keep(rows)
        self.taught = [self.taught[row] for row in rows]


def taught_lattice(lattice, tokens, spares, sure, beta):
    """A lattice of which `tokens [N, S]` are the first candidates with probability `sure`, `spares` the second."""
    if lattice is None:
        return None
    candidates = lattice.candidates.clone()
    count = candidates.shape[-1]
    for rank, wanted in enumerate((tokens, spares)[:count]):
        # The place of a candidate that moves up is taken by the one it moves away.
        moved = candidates[..., rank].clone()
        same = (candidates == wanted[..., None]) & (torch.arange(count) > rank)
        candidates = torch.where(same, moved[..., None], candidates)
        candidates[..., rank] = wanted
    rest = (1 - sure) * 0.5 ** torch.arange(1, count)
    chances = torch.cat([torch.tensor([sure]), rest]).log().expand(candidates.shape)
    first = pair = None
    if lattice.pair_scores is not None:
        first = chances[:, 0] / beta
        pair = chances[:, 1:, None].expand(-1, -1, count, -1) / beta
    return replace(
        lattice, candidates=candidates, log_probs=chances, first_scores=first, pair_scores=pair,
        picks=torch.zeros_like(tokens),
    )  # fmt: skip


@pytest.fixture(scope="session")
def _targets():
    return {kind: build_target(kind) for kind in ("llama", "qwen3")}


@pytest.fixture(params=["llama", "qwen3"])
def target(request, _targets):
    return _targets[request.param]


@pytest.fixture
def llama(_targets):
    return _targets["llama"]


@pytest.fixture(params=["none", "lilicorr"])
def drafter(request, target):
    return build_drafter(target, request.param)


@pytest.fixture
def llama_drafter(llama):
    return build_drafter(llama, "lilicorr")


@pytest.fixture
def new_target():
    return build_target


@pytest.fixture
def new_drafter():
    return build_drafter


@pytest.fixture
def teach():
    return teach_drafter


@pytest.fixture
def prompt():
    """Seeded prompts `[1, length]`."""

    def make(length, seed=0):
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(1, VOCAB, (1, length), generator=generator)

    return make


@pytest.fixture
def tokenizer():
    """A token for every printable character: id n is `chr(30 + n)`, after padding 0 and start 1."""
    vocab = {"<pad>": 0, "<s>": 1} | {chr(30 + index): index for index in range(2, VOCAB)}
    backend = Tokenizer(BPE(vocab, []))
    backend.decoder = Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", bos_token="<s>")


def all_taken(figures):
    """Whether every block was whole and accepted to its last token, but for the last, which the limit cut."""
    *whole, last = figures.committed_per_block
    accepted = [a + 1 for a in figures.accepted_per_block]
    return all(each == 8 for each in whole) and accepted == [*whole, last] and figures.accepted > 0
