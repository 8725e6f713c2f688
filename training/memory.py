"""How much memory a training step needs: a formula over shapes, for planning. Counts bytes of one process."""

from typing import Any

from ..modeling_lilicorr.configuration_lilicorr import LiLiCorrConfig
from .losses.xpress import XPressLoss
from .settings import TrainSettings
from .vocabulary import CHUNK_ROWS

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def step_memory(
    settings: TrainSettings,
    config: LiLiCorrConfig,
    target: Any,
    parameters: dict[str, int],
    sequences: int,
    micro_batches: int,
) -> dict[str, int]:
    """Bytes of one process by what takes them, at the greatest sequence length and number of anchors.

    Args:
        config: the drafter's; target: the target's text config.
        parameters: how many `target`, `drafter` and `trained` ones there are.
        sequences: those of one micro-batch; micro_batches: how many a step.
    """
    length, small = settings.max_length, 2 if settings.mixed_precision == "bf16" else 4
    states = BYTES[settings.dtype] * sequences * length * target.hidden_size
    anchors = min(settings.anchors, length - 1, settings.blocks_at_once or settings.anchors)
    found = {
        "target weights": BYTES[settings.dtype] * parameters["target"],
        "drafter weights": (4 if small == 4 else 6) * parameters["drafter"],  # the masters and a bf16 copy
        "gradients and moments": 12 * parameters["trained"],
        "target states": states * (len(config.target_layer_ids) + 1) * micro_batches,
        "target pass": states * (target.num_hidden_layers + 1),
        "backbone": 0 if settings.freeze_backbone else _backbone(settings, config, sequences, anchors, small),
        "head": sequences * anchors * _head(config, small),
        "vocabulary": (_logits(config) + BYTES[settings.dtype]) * CHUNK_ROWS * config.vocab_size,
    }
    return {name: size for name, size in found.items() if size}


def _backbone(settings: TrainSettings, config: LiLiCorrConfig, sequences: int, anchors: int, small: int) -> int:
    """Activations that the backbone keeps for its backward pass."""
    width, inner = config.hidden_size, config.intermediate_size
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    length, rows = settings.max_length, anchors * config.block_size
    # Norms keep their input and their scaled input in fp32; the rest is kept as it enters a product.
    a_row = 4 * (4 * width) + small * (2 * width + 5 * queries + 2 * keys + 4 * inner)
    if config.conv_kernel_size:  # kernels and what they weigh, in and out of two sublayers
        a_row += small * 4 * width * (config.conv_kernel_size + 1)
    groups = -(-anchors // settings.blocks_together)
    group = -(-anchors // groups) * config.block_size
    seen = groups * (length + group)  # keys and values, repeated over heads
    layer = sequences * (rows * a_row + small * (2 * seen * queries + 2 * length * keys))
    mask = sequences * group * seen
    entry = sequences * length * width * (small * (len(config.target_layer_ids) + 1) + 8)
    if settings.gradient_checkpointing:
        return entry + mask + layer + config.num_hidden_layers * sequences * rows * width * 4
    return entry + mask + config.num_hidden_layers * layer


def _logits(config: LiLiCorrConfig) -> int:
    """Bytes for every logit of a chunk; what corrects all of them works its chunks out again in the backward pass."""
    return 24 if config.head_type in ("domino", "dspark", "xpress") else 4


def _head(config: LiLiCorrConfig, small: int) -> int:
    """Activations that the head and its loss keep for one block."""
    slots, width, head = config.num_slots, config.hidden_size, config.head_config
    if config.head_type == "domino":
        state, rank = head["gru_hidden_dim"], head["emb_dim"]
        return slots * (small * (3 * width + 9 * state + 4 * rank))
    if config.head_type == "dspark":
        return slots * small * 2 * (width + head["markov_rank"])
    if config.head_type == "xpress":
        rounds = 1 + XPressLoss.settings["consistency_passes"]  # or fewer, where the objective says so
        a_round = small * (6 + 4 * head["mlp_ratio"]) * head["rank"]
        return config.block_size * (small * 3 * width + rounds * a_round)
    if config.head_type not in ("lilicorr", "dcoco", "selector"):
        return 0
    nodes, pairs = slots * head["num_candidates"], slots * head["num_candidates"] ** 2
    if config.head_type == "dcoco":
        a_node = small * (width + 4 * head["width"])
        return nodes * a_node + pairs * (2 * small * head["hidden_size"] + 8) + 2 * small * slots * width
    if config.head_type == "selector":
        return nodes * (5 * 4 * head["rank"] + 16) + slots * (small * width + 12 * head["rank"])
    inner = head["hidden_size"]
    layer = 4 * 4 * inner + small * (8 * inner + 2 * head["intermediate_size"] + 2 * head["num_heads"] * nodes)
    ends = small * (width + 14 * inner) + 4 * 4 * head["factor_dim"]
    return nodes * (head["num_layers"] * layer + ends) + 4 * 2 * pairs
