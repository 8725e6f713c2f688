import math
from pathlib import Path

import lilicorr
import pytest

FOLDER = Path(lilicorr.__file__).parent / "evaluation" / "acceptance_length"


@pytest.fixture(scope="module")
def metric(tmp_path_factory):
    evaluate = pytest.importorskip("evaluate")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setattr(evaluate.config, "HF_MODULES_CACHE", str(tmp_path_factory.mktemp("modules")))
        yield evaluate.load(str(FOLDER), cache_dir=str(tmp_path_factory.mktemp("metrics")))


def test_acceptance_length_weighs_blocks_and_counts_the_bonus(metric):
    assert metric.compute(predictions=[[3, 0, 2], [5]]) == {"acceptance_length": pytest.approx(1 + 10 / 4)}


def test_other_figures_on_request(metric):
    figures = metric.compute(predictions=[[3, 0, 2], [5]], poolings=True)
    assert figures["mean_of_response_means"] == pytest.approx((1 + 5 / 3 + 6) / 2)
    assert figures["accepted_by_slot"] == [0.75, 0.75, 0.5, 0.25, 0.25]


def test_batches_add_up_and_nothing_is_nan(metric):
    metric.add_batch(predictions=[[3, 0, 2]])
    metric.add_batch(predictions=[[5]])
    assert metric.compute()["acceptance_length"] == pytest.approx(3.5)
    assert math.isnan(metric.compute(predictions=[[]])["acceptance_length"])


def test_negative_counts_are_refused(metric):
    with pytest.raises(ValueError, match="expected 0 or more"):
        metric.compute(predictions=[[-1]])
