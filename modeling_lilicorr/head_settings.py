"""Settings of every head: their names, the papers' values, and what cannot work."""

from collections.abc import Iterator
from typing import Any

from .config_checks import WIDEST, shown

HEAD_TYPES = ("none", "lilicorr", "dcoco", "domino", "dspark", "selector", "xpress")
MARKOV_HEADS = ("vanilla", "gated", "rnn")
WALKS = ("greedy", "longest")
SAID = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}
# Far beyond any head, so that none is built that no checkpoint can hold. Candidates are bounded by the vocabulary.
MOST = {"num_candidates": 1 << 28, "num_layers": 1 << 10, "mlp_ratio": 1 << 10, "num_jacobi_passes": 1 << 10}

# Settings that a configuration may lack.
OPTIONAL = {"lilicorr": ("residual", "walk", "tree_beta"), "dcoco": ("tree_beta",), "selector": ("tree_beta",)}
TREE_BETAS = {"lilicorr": 0.6, "dcoco": 1.0, "selector": 1.0}  # of heads that were never calibrated
POSITIVE = {
    "lilicorr": (
        "num_layers",
        "num_heads",
        "hidden_size",
        "intermediate_size",
        "factor_dim",
        "logit_scale",
        "vector_eps",
    ),
    "dcoco": ("width", "hidden_size"),
    "domino": ("gru_hidden_dim", "emb_dim"),
    "dspark": ("markov_rank",),
    "selector": ("rank",),
    "xpress": ("rank", "mlp_ratio", "num_jacobi_passes"),
}


def default_head_config(head_type: str, hidden_size: int) -> dict[str, Any]:
    """The papers' head settings, with inner widths of at most half the target's where it is narrow.

    `lilicorr` as its Table 4; `domino`, `dspark`, `selector` and `xpress` as their authors' configurations for Qwen3;
    `dcoco`, whose widths are not published, with those that give its parameter count.
    """

    def width(full: int) -> int:
        return min(full, max(64, hidden_size // 2 // 64 * 64))

    if head_type == "lilicorr":
        return {
            "num_candidates": 8,
            "hidden_size": width(1024),
            "num_layers": 2,
            "num_heads": max(2, min(8, width(1024) // 64)),
            "intermediate_size": 2 * width(1024),
            "factor_dim": width(1024),
            "logit_scale": 8.0,
            "vector_eps": 1e-6,
        }
    if head_type == "dcoco":
        return {"num_candidates": 16, "width": width(128), "hidden_size": width(256)}
    if head_type == "domino":
        return {"gru_hidden_dim": width(1024), "emb_dim": width(256), "pure_draft_prefix_len": 1}
    if head_type == "dspark":
        return {
            "markov_rank": width(256),
            "markov_head_type": "vanilla",
            "enable_confidence_head": True,
            "confidence_head_with_markov": True,
        }
    if head_type == "selector":
        return {"num_candidates": 16, "rank": width(256)}
    if head_type == "xpress":
        return {"rank": width(256), "mlp_ratio": 2, "num_jacobi_passes": 6}
    return {}


def head_problems(head_type: str, head: dict[str, Any], vocab_size: int) -> Iterator[str]:
    """Yield what is wrong with the settings `head` of a head of this type, each in one sentence."""
    defaults = default_head_config(head_type, 64)
    missing = [key for key in defaults if head.get(key) is None]
    if missing:
        yield f"head_config lacks {', '.join(missing)}; the head cannot be rebuilt without all of its settings."
        return
    for key, default in defaults.items():
        allowed = (int, float) if type(default) is float else (type(default),)
        if type(head[key]) not in allowed:
            yield f"The head's {key} is {shown(head[key])}, expected {SAID[type(default)]}."
            return
        most = MOST.get(key, WIDEST)
        if type(head[key]) in (int, float) and head[key] > most:
            yield f"The head's {key} is {shown(head[key])}, expected at most {most:,}."
            return
    count = head.get("num_candidates", 1)
    if type(count) is not int or not 1 <= count <= vocab_size:
        yield f"num_candidates is {shown(count)}, expected 1 to the vocabulary's {vocab_size}."
    if not isinstance(head.get("residual", False), bool):
        yield f"The head's residual is {shown(head['residual'])}, expected true or false."
    if head.get("walk", "greedy") not in WALKS:
        yield f"The head's walk is {shown(head['walk'])}, expected one of {', '.join(WALKS)}."
    beta = head.get("tree_beta", 1.0)
    if isinstance(beta, bool) or not isinstance(beta, (int, float)) or not 0 < beta < float("inf"):
        yield f"The head's tree_beta is {shown(beta)}, expected a positive number."
    for key in POSITIVE.get(head_type, ()):
        if not head[key] > 0:
            yield f"The head's {key} must be positive, got {head[key]}."
            return
    if head_type == "lilicorr" and head["hidden_size"] % head["num_heads"]:
        yield f"The head's hidden_size {head['hidden_size']} is not a multiple of its num_heads {head['num_heads']}."
    if head_type == "domino" and head["pure_draft_prefix_len"] < 0:
        yield f"The head's pure_draft_prefix_len is {head['pure_draft_prefix_len']}, expected 0 or more slots."
    if head_type == "dspark" and head["markov_head_type"] not in MARKOV_HEADS:
        yield f"markov_head_type is {shown(head['markov_head_type'])}, expected one of {', '.join(MARKOV_HEADS)}."
