"""Two processes on the CPU (gloo) train what one trains."""

import json
import os
import subprocess
import sys

import pytest
import torch
from lilicorr.training.checkpoint import kept_states
from lilicorr.training.processes import add_up
from lilicorr.training.train import train
from safetensors.torch import load_file

# accelerate offers FSDP2 for accelerators only; its own preparation runs on the CPU as well.
SHARDED = """
import sys
from accelerate import FullyShardedDataParallelPlugin
from accelerate.utils import DistributedType
from lilicorr.training import train as train_module
import lilicorr.training.__main__ as main

start = train_module.start_accelerator

def sharded(settings):
    accelerator = start(settings)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, cpu_ram_efficient_loading=False)
    accelerator.state._shared_state.update(distributed_type=DistributedType.FSDP, fsdp_plugin=plugin)
    return accelerator

train_module.start_accelerator = sharded
main.typer.run(main.train)
"""


@pytest.fixture
def uneven(tmp_path):
    """Answers of very different lengths, so that processes draw different numbers of anchors."""
    rows = [
        {
            "id": f"u{i}",
            "messages": [{"role": "user", "content": f"w{i} w{i + 3}"}, {"role": "assistant", "content": "w1"}],
            "output_ids": [7 + (5 * i + j * j) % 50 for j in range(3 + 5 * (i % 5))],
        }
        for i in range(16)
    ]
    path = tmp_path / "uneven.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [str(path)]


def launch(program, recipe, settings):
    """`settings` on two processes, started as accelerate starts them."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", *program]
    command += [str(recipe), "--data", settings.data[0], "--output", settings.output, "--target", settings.target]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def assert_close_runs(ours, theirs):
    """The same log, loss by loss, and the same weights, up to the order of sums."""
    lines = [[json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()] for run in (ours, theirs)]
    for a, b in zip(*lines, strict=True):
        assert a.keys() == b.keys()
        for name in a.keys() - {"unix_time", "tokens_per_second"}:
            assert a[name] == pytest.approx(b[name], rel=1e-3, abs=1e-6), (a["step"], name)
    a, b = load_file(kept_states(ours)[0]), load_file(kept_states(theirs)[0])
    assert a.keys() == b.keys()
    for name in a:
        if name.startswith("model."):
            torch.testing.assert_close(a[name], b[name], rtol=1e-2, atol=1e-4, msg=name)


def test_two_processes_with_uneven_anchors_equal_one(tmp_path, make_settings, write_recipe, uneven):
    options = {"data": uneven, "anchors": 12, "steps": 6, "log_every": 1, "micro_batch_size": 1}
    two, one = make_settings(tmp_path / "two", **options), make_settings(tmp_path / "one", **options)
    launch(["-m", "lilicorr.training"], write_recipe(tmp_path / "r.yaml", two), two)
    train(one)
    assert_close_runs(tmp_path / "two", tmp_path / "one")
    drafters = [load_file(tmp_path / run / "checkpoint" / "model.safetensors") for run in ("two", "one")]
    assert drafters[0].keys() == drafters[1].keys()


def test_two_sharded_processes_equal_one_and_one_resumes_what_two_saved(tmp_path, make_settings, write_recipe, uneven):
    options = {"data": uneven, "anchors": 12, "steps": 6, "log_every": 1, "save_every": 3}
    two = make_settings(tmp_path / "two", micro_batch_size=1, **options)
    (tmp_path / "sharded.py").write_text(SHARDED)
    launch([str(tmp_path / "sharded.py")], write_recipe(tmp_path / "r.yaml", two), two)
    one = make_settings(tmp_path / "one", **options)
    train(one)
    assert_close_runs(tmp_path / "two", tmp_path / "one")
    kept_states(tmp_path / "two")[0].unlink()
    train(make_settings(tmp_path / "two", **options))
    assert_close_runs(tmp_path / "two", tmp_path / "one")


def test_sums_of_slots_and_scalars_add_up_in_one_message():
    class Alone:
        num_processes = 2

        def reduce(self, message, how):
            assert how == "sum"
            return 2 * message

    sums = {"a": torch.tensor(1.0, requires_grad=True), "b": torch.tensor([1, 2, 3])}
    totals = add_up(Alone(), [sums, sums], {"save": 1.0})
    assert totals["a"] == 4 and totals["b"].tolist() == [4, 8, 12] and totals["save"] == 2
    assert not totals["a"].requires_grad
