"""The DSpark head (arXiv 2607.05147): a low-rank Markov bias from each token to the next, and a confidence."""

import torch
from torch import Tensor, nn

from .configuration_lilicorr import LiLiCorrConfig
from .lattice import Block, Draft
from .lattice_drafts import SHOWN_CANDIDATES, commit_slots


class MarkovHead(nn.Module):
    """From the token before a slot to what is added to its logits, through a code of `rank` numbers."""

    def __init__(self, kind: str, hidden_size: int, vocab_size: int, rank: int) -> None:
        super().__init__()
        self.kind = kind
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, vocab_size, bias=False)
        if kind == "gated":
            self.gate_proj = nn.Linear(hidden_size + rank, rank)
        if kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + hidden_size, 3 * rank)

    def blank(self, blocks: int) -> Tensor:
        """The state at the start of a block, `[blocks, rank]`."""
        return self.markov_w1.weight.new_zeros(blocks, self.markov_w1.embedding_dim)

    def step(self, hidden: Tensor, embed: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Code and next state of one slot, both `[N, rank]`.

        Args:
            hidden: drafter states, `[N, d]`; embed: `markov_w1` of the token before, `[N, rank]`.
            state: `[N, rank]`; only the kind `rnn` changes it.
        """
        if self.kind == "vanilla":
            return embed, state
        if self.kind == "gated":
            return torch.sigmoid(self.gate_proj(torch.cat([hidden, embed], dim=-1))) * embed, state
        keep, new, out = self.joint_proj(torch.cat([state, embed, hidden], dim=-1)).chunk(3, dim=-1)
        keep = torch.sigmoid(keep)
        return torch.tanh(out), keep * state + (1 - keep) * torch.tanh(new)


class ConfidenceHead(nn.Module):
    """One logit: whether a slot is accepted, given that all before it are."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, 1)

    def forward(self, features: Tensor) -> Tensor:
        """`[..., width]` to `[...]` (fp32)."""
        return self.proj(features).squeeze(-1).float()


class DSparkHead(nn.Module):
    """Corrects every slot's logits, the first too, by the token before it: a bigram bias in the kind `vanilla`.

    Settings: `markov_rank`, `markov_head_type` (`vanilla`, `gated` or `rnn`), `enable_confidence_head`,
    `confidence_head_with_markov` (the confidence also sees the token before). Drafts are whole: the confidence is
    trained, but does not shorten them. With `block.warp` tokens are drawn from the corrected logits instead, slot after
    slot, and the draft tells what from (the authors' contract under sampling).
    """

    grows_trees = False

    def __init__(self, config: LiLiCorrConfig) -> None:
        super().__init__()
        settings = config.head_config
        rank = settings["markov_rank"]
        self.num_candidates = min(SHOWN_CANDIDATES, config.vocab_size)
        self.tree_beta: float = 1.0
        self.with_markov: bool = settings["confidence_head_with_markov"]
        self.markov_head = MarkovHead(settings["markov_head_type"], config.hidden_size, config.vocab_size, rank)
        self.confidence_head: ConfidenceHead | None = None
        if settings["enable_confidence_head"]:
            self.confidence_head = ConfidenceHead(config.hidden_size + (rank if self.with_markov else 0))

    def codes(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """What `corrections` turns into the bias of each slot.

        Args:
            hidden: drafter states of the slots, `[N, S, d]`; previous: the token before each, `[N, S]` (int64).

        Returns:
            `[N, S, markov_rank]`.
        """
        embeds = self.markov_head.markov_w1(previous)
        hidden, state = hidden.to(embeds.dtype), self.markov_head.blank(len(hidden))
        codes = []
        for slot in range(hidden.shape[1]):
            code, state = self.markov_head.step(hidden[:, slot], embeds[:, slot], state)
            codes.append(code)
        return torch.stack(codes, dim=1)

    def corrections(self, codes: Tensor) -> Tensor:
        """`[..., markov_rank]` to `[..., vocab]`."""
        return self.markov_head.markov_w2(codes)

    def confidences(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """Logits of each slot's acceptance, `[N, S]` (fp32); arguments as `codes`.

        Raises:
            ValueError: the head has none.
        """
        if self.confidence_head is None:
            raise ValueError("This dspark head has no confidence; build it with enable_confidence_head.")
        embeds = self.markov_head.markov_w1(previous)
        hidden = hidden.to(embeds.dtype)
        return self.confidence_head(torch.cat([hidden, embeds], dim=-1) if self.with_markov else hidden)

    def draft(self, block: Block, return_lattice: bool = False) -> Draft:
        """Slot after slot the argmax of the corrected logits, or a draw; see `Draft` for the result."""
        hidden = block.hidden.to(self.markov_head.markov_w1.weight.dtype)
        state = self.markov_head.blank(len(hidden))

        def correction(slot: int, previous: Tensor) -> Tensor:
            nonlocal state
            code, state = self.markov_head.step(hidden[:, slot], self.markov_head.markov_w1(previous), state)
            return self.corrections(code)

        return commit_slots(block, correction, self.num_candidates, return_lattice)
