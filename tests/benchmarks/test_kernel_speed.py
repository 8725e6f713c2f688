import json
import os

import pytest
import torch
import typer
from typer.testing import CliRunner


def run(script, *arguments):
    app = typer.Typer()
    app.command()(script.main)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def test_dry_run_measures_every_arm_of_every_case(script, tmp_path, monkeypatch):
    monkeypatch.delenv("LILICORR_KERNELS", raising=False)
    file = tmp_path / "kernels.json"
    result = run(script, "--dry-run", "--blocks", 1, "--no-compiled", "--out", file)
    assert result.exit_code == 0, result.output
    assert "LILICORR_KERNELS" not in os.environ
    report = json.loads(file.read_text())
    assert report["dry_run"] and report["machine"]["torch"] == torch.__version__
    names = [row["case"].split()[0] for row in report["rows"]]
    walks = ["greedy_walk", "exact_path", "longest_path", "residual"]
    pooling, lattice = ["topk_logsumexp", "topk_features"], ["lattice_attention", "lattice_network"]
    assert names == [*pooling, lattice[0], *walks, lattice[1], "head"]
    for row in report["rows"]:
        assert row["inputs"] >= 8 and row["inputs"] * row["floor_bytes"] >= 2 * script.DRY_RUN_CACHE
        assert next(iter(row["arms"])) == "reference"
        for arm in row["arms"].values():
            assert arm["samples"] == 2
            assert arm["to_floor"] == pytest.approx(arm["microseconds"] / row["floor_microseconds"])
    assert result.output.count("| to floor |") == 1 and "| head tiny | 1 | auto |" in result.output


def test_floor_counts_what_a_call_must_read(script):
    sizes = script.Sizes("x", 64, 700, slots=3, candidates=4, width=64)
    found = {case.name.split()[0]: case for case in script.cases(sizes, 2, torch.device("cpu"), compiled=False)}
    assert found["topk_logsumexp"].floor_bytes == 2 * 3 * 700 * 2
    # Per block: packed projections of 12 nodes, and what is attended.
    assert found["lattice_attention"].floor_bytes == 2 * (3 + 1) * 12 * 64 * 2
    # Per block: in vectors of 3 slots, out vectors of the first 2, one of the anchor.
    assert found["greedy_walk"].floor_bytes == 2 * 64 * 2 * (3 * 4 + 2 * 4 + 1)
    assert found["residual"].floor_bytes == found["greedy_walk"].floor_bytes + 2 * 3 * 4 * 4


def test_inputs_differ_from_copy_to_copy(script):
    sizes = script.Sizes("x", 64, 700, slots=3, candidates=4, width=64)
    case = next(script.cases(sizes, 1, torch.device("cpu"), compiled=False))
    assert not torch.equal(case.make(0)[0], case.make(1000)[0])
    assert torch.equal(case.make(0)[0], case.make(0)[0])


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_only_a_dry_run_is_offered(script):
    result = run(script)
    assert result.exit_code == 1 and "give --dry-run" in result.output
