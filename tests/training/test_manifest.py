import json

import pytest
from lilicorr.training.manifest import Manifest, manifest_path, training_data


def manifest(**changes):
    parts = {"target": "org/target", "revision": "abc", "template_sha256": "00", "template_options": {}}
    return Manifest(**(parts | {"decoding": {"temperature": 0.0, "seed": 0}, "counts": {"rows": 3}} | changes))


def test_is_read_as_it_was_written_and_lies_beside_the_answers(tmp_path):
    assert Manifest.beside(tmp_path / "a.jsonl") is None
    manifest().save_beside(tmp_path / "a.jsonl")
    assert Manifest.beside(tmp_path / "a.jsonl") == manifest()
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl.manifest.json"]


@pytest.mark.parametrize(
    "content",
    [
        "{",
        "[]",
        "{}",
        '{"target": "a", "revision": null, "template_sha256": 5}',
        "\xff",
        '{"target": "a", "revision": {}, "template_sha256": "b"}',
        "[" * 100_000,
        '{"target": "a", "revision": null, "template_sha256": "b", "decoding": "x"}',
        '{"target": "a", "revision": null, "template_sha256": "b", "decoding": null}',
    ],
)
def test_a_broken_manifest_is_one_sentence(tmp_path, content):
    manifest_path(tmp_path / "a.jsonl").write_bytes(content.encode("latin-1"))
    with pytest.raises(ValueError, match=r"a\.jsonl\.manifest\.json .*mend or remove it"):
        Manifest.beside(tmp_path / "a.jsonl")


def test_differences_are_named_and_a_target_is_known_by_its_revision():
    assert manifest().differences(manifest(target="elsewhere/same", counts={})) == []
    assert manifest().differences(manifest(revision="def")) == ["target"]
    assert manifest(revision=None).differences(manifest(target="other", revision=None)) == ["target"]
    assert manifest().differences(manifest(decoding={"seed": 1}, template_sha256="11")) == [
        "chat template", "seed", "temperature",
    ]  # fmt: skip


def test_the_thinking_mode_of_the_answers_is_what_a_drafter_records(tmp_path):
    paths = [tmp_path / name for name in ("a.jsonl", "b.jsonl", "bare.jsonl")]
    manifest(template_options={"enable_thinking": False}).save_beside(paths[0])
    manifest(template_options={"enable_thinking": False}, decoding={"temperature": 1.0}).save_beside(paths[1])
    record = training_data(paths, {"tokens": 7})
    assert record == {"tokens": 7, "template_options": {"enable_thinking": False}, "revision": "abc"}
    assert json.loads(json.dumps(record)) == record
    assert training_data(paths[2:], {"tokens": 7}) == {"tokens": 7}
    manifest(template_options={"enable_thinking": True}).save_beside(paths[1])
    with pytest.raises(ValueError, match=r"b\.jsonl was made with template options .*train on answers that agree"):
        training_data(paths, {})
