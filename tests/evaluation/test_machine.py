from types import SimpleNamespace

import torch
from lilicorr.evaluation import machine as module


def test_a_cpu_is_named_with_what_its_products_may_use():
    assert torch.backends.cpu.get_cpu_capability() in module.machine(torch.device("cpu"))["device"]


def test_repositories_are_told_apart_by_commit_though_their_configuration_knows_none(tmp_path, monkeypatch):
    model, commits = SimpleNamespace(config=SimpleNamespace()), iter(("a" * 40, "b" * 40))
    monkeypatch.setattr(
        module, "try_to_load_from_cache", lambda repository, name: str(tmp_path / "snapshots" / next(commits) / name)
    )
    assert [module.fingerprint("someone/drafter", model) for _ in range(2)] == ["a" * 40, "b" * 40]


def test_folders_are_told_apart_by_what_they_hold(tmp_path):
    for name, weights in {"one": b"1", "two": b"2", "three": b"1"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        (tmp_path / name / "model.safetensors").write_bytes(weights)
    one, two, three = (module.fingerprint(tmp_path / name, None) for name in ("one", "two", "three"))
    assert one == three != two
