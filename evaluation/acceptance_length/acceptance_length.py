"""Acceptance length as a metric of Hugging Face's `evaluate`: `evaluate.load(<this folder>)`."""

from collections.abc import Sequence
from typing import Any

import datasets
import evaluate
from lilicorr.evaluation.metrics import Trace, acceptance_by_slot, acceptance_length, mean_of_response_means

DESCRIPTION = (
    "Tokens that a speculative decoder commits per verified block, the target's own token included, every block "
    "weighing the same: 1 + accepted drafts / blocks."
)
INPUTS = """
Args:
    predictions: for each answer the number of accepted drafts of every verified block, such as [[3, 0, 2], [5]].
    poolings: also give the mean of the answers' own acceptance lengths (z-lab) and the share of blocks accepted at
        least to slot 1, 2, …
Returns:
    `acceptance_length`, and on request `mean_of_response_means` and `accepted_by_slot`; NaN without blocks.
"""
CITATION = "arXiv:2608.20530"


class AcceptanceLength(evaluate.Metric):
    """Block-weighted acceptance length with the bonus token."""

    def _info(self) -> Any:
        features = datasets.Features({"predictions": datasets.Sequence(datasets.Value("int64"))})
        return evaluate.MetricInfo(
            description=DESCRIPTION, citation=CITATION, inputs_description=INPUTS, features=features
        )

    def _compute(self, predictions: Sequence[Sequence[int]], poolings: bool = False) -> dict[str, Any]:
        """Raises a `ValueError` for a negative number of accepted drafts."""
        traces = [_trace(blocks) for blocks in predictions]
        figures: dict[str, Any] = {"acceptance_length": acceptance_length(traces)}
        if poolings:
            figures["mean_of_response_means"] = mean_of_response_means(traces)
            figures["accepted_by_slot"] = acceptance_by_slot(traces)
        return figures


def _trace(accepted: Sequence[int]) -> Trace:
    """The trace of one answer from the accepted drafts of its blocks; the prefill's token is not among them."""
    if min(accepted, default=0) < 0:
        raise ValueError(f"A block has {min(accepted)} accepted drafts, expected 0 or more; leave out the bonus token.")
    per_slot = tuple(sum(count > slot for count in accepted) for slot in range(max(accepted, default=0)))
    return Trace(len(accepted), per_slot, sum(accepted) + len(accepted))
