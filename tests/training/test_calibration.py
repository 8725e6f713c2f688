"""How a head's scores become probabilities: the fitted number, and where a run keeps it."""

import json

import pytest
import torch
from lilicorr import LiLiCorrConfig, LiLiCorrModel
from lilicorr.training import calibration
from lilicorr.training.calibration import fit_tree_beta
from lilicorr.training.train import train
from transformers import AutoModelForCausalLM


@pytest.mark.parametrize("true", [0.25, 1.0, 2.5])
def test_the_fitted_beta_is_that_of_the_distribution(target_folder, monkeypatch, true):
    generator = torch.Generator().manual_seed(1)
    scores = torch.randn(6000, 5, generator=generator) * 2
    successors = torch.multinomial((true * scores).softmax(-1), 1, generator=generator).squeeze(1)
    monkeypatch.setattr(
        calibration, "_true_rows", lambda *_: [(scores[:3000], successors[:3000]), (scores[3000:], successors[3000:])]
    )
    target = AutoModelForCausalLM.from_pretrained(target_folder)
    drafter = LiLiCorrModel(LiLiCorrConfig.for_target(target.config, mask_token_id=0, block_size=4))
    assert fit_tree_beta(drafter, target, [(None, None, None)]) == pytest.approx(true, rel=0.15)


@pytest.mark.parametrize("head,fitted", [("lilicorr", True), ("none", False)])
def test_a_run_keeps_it_in_the_heads_configuration(make_settings, tmp_path, head, fitted):
    folder = train(make_settings(tmp_path / "run", head_type=head, steps=2))
    written = json.loads((folder / "config.json").read_text())["head_config"]
    assert ("tree_beta" in written) == fitted
    if fitted:
        assert 0.03 <= written["tree_beta"] <= 5.7
        assert LiLiCorrModel.from_pretrained(folder).head.tree_beta == written["tree_beta"]
