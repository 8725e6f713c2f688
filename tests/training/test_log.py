import json
import sys

import pytest
import torch
from lilicorr.training.log import StepLog, means, read_log
from lilicorr.training.report import write_report
from lilicorr.training.train import train

SLOTS = torch.tensor([8.0, 4.0, 2.0])
SUMS = {
    "dflash": torch.tensor(30.0), "weight": torch.tensor(10.0), "blocks": torch.tensor(10.0),
    "cross_entropy": torch.tensor(7.0), "covered": torch.tensor(14.0), "walk_accepted": SLOTS,
    "argmax_accepted": torch.tensor(5.0), "oracle_accepted": 2 * SLOTS,
    "in_candidates": SLOTS, "supervised": torch.tensor([10.0, 8.0, 8.0]), "tokens": torch.tensor(100.0),
}  # fmt: skip


def test_means_of_scalars_and_of_slots():
    line = means(SUMS)
    assert line["dflash"] == 3 and line["cross_entropy"] == 0.5
    assert line["argmax_length"] == 1.5 and "argmax_by_slot" not in line
    assert line["walk_length"] == pytest.approx(2.4) and line["walk_by_slot"] == pytest.approx([0.8, 0.4, 0.2])
    assert line["coverage_by_slot"] == pytest.approx([0.8, 0.5, 0.25])
    assert line["blocks"] == 10 and line["tokens"] == 100 and "weight" not in line


def test_a_line_is_the_mean_over_its_steps(tmp_path):
    log = StepLog(tmp_path)
    log.add(SUMS)
    log.add(SUMS | {"dflash": torch.tensor(50.0)})
    line = log.flush(2, learning_rate=0.5)
    assert line["dflash"] == 4 and line["blocks"] == 20 and line["tokens_per_second"] > 0
    assert read_log(log.path) == [line] and log.sums == {}


def test_a_broken_line_in_the_middle_is_named(tmp_path):
    (tmp_path / "log.jsonl").write_text('{"step": 1}\n[]\n{"step": 3}\n')
    with pytest.raises(ValueError, match=r"log\.jsonl line 2 is no line of a training log"):
        read_log(tmp_path / "log.jsonl")


def write_log(folder, count):
    with open(folder / "log.jsonl", "w") as log:
        for step in range(1, count + 1):
            log.write(json.dumps({"step": step, **means(SUMS), "tokens_per_second": 7.0}) + "\n")


def test_the_report_is_made_anew_from_the_log(tmp_path):
    pytest.importorskip("matplotlib")
    write_log(tmp_path, 3)
    text = write_report(tmp_path).read_text()
    assert "3 steps, 30 blocks and 300 tokens." in text and "Median rate: 7 tokens a second." in text
    assert "| walk acceptance length | 2.4000 | 2.4000 | 2.4000 |" in text
    for name in ("losses", "acceptance", "coverage"):
        assert f"(report/{name}.png)" in text
        assert (tmp_path / "report" / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_the_report_without_matplotlib_says_so(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    write_log(tmp_path, 1)
    assert "matplotlib is not installed" in write_report(tmp_path).read_text()


def test_no_log_is_one_sentence(tmp_path):
    with pytest.raises(ValueError, match="holds no line to report on"):
        write_report(tmp_path)


def test_a_run_ends_with_its_report(tmp_path, make_settings):
    train(make_settings(tmp_path, steps=2, log_every=1))
    text = (tmp_path / "report.md").read_text()
    assert "| dflash |" in text and "| walk acceptance length |" in text
    line = read_log(tmp_path / "log.jsonl")[-1]
    for kind in ("argmax", "walk", "oracle"):
        assert len(line[f"{kind}_by_slot"]) == 3 and line[f"{kind}_length"] == pytest.approx(
            1 + sum(line[f"{kind}_by_slot"])
        )
    # A label on the covered prefix is among its slot's candidates.
    assert len(line["coverage_by_slot"]) == 3 and all(0 <= share <= 1 for share in line["coverage_by_slot"])
    assert not {"in_candidates", "supervised", "weight"} & line.keys()
