import pytest
import torch
import typer
from lilicorr.evaluation.loading import load_pair
from typer.testing import CliRunner


def test_a_line_for_every_number_of_slots(script, tiny_folders):
    app = typer.Typer()
    app.command()(script.main)
    options = ["--drafter", tiny_folders / "lilicorr", "--target", tiny_folders / "target", "--repeats", 1]
    result = CliRunner().invoke(app, [str(option) for option in options] + ["--device", "cpu", "--dtype", "fp32"])
    assert result.exit_code == 0, result.output
    lines = [line.split("|") for line in result.output.splitlines() if line.count("|") == 7]
    assert [line[1].strip() for line in lines[2:]] == ["1", "2", "3", "4"]


def test_stages_are_those_of_the_draft(script, tiny_folders, monkeypatch):
    pair = load_pair(tiny_folders / "target", {"drafter": str(tiny_folders / "lilicorr")}, dtype="fp32", device="cpu")
    results = []

    def keep(work, repeats, device):
        results.append(work())
        return 0.0

    monkeypatch.setattr(script, "median_seconds", keep)
    stages = script.measure(pair.target, pair.drafters["drafter"], context=6, slots=2, repeats=1)
    assert set(stages) == {"draft", "backbone", "lm_head", "head"}
    draft, backbone, logits, alone = results
    assert draft.tokens.shape == alone.tokens.shape == (1, 2)
    assert backbone.shape == (1, 3, 32) and logits.shape[:2] == (1, 2)
    assert torch.isfinite(backbone).all()


def test_unusable_folder_is_one_sentence(script, tmp_path):
    with pytest.raises(SystemExit, match=r"The target folder .* holds no config\.json"):
        script.main(drafter=tmp_path, target=str(tmp_path), repeats=1)
