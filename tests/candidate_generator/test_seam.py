"""The wrap around `_get_candidate_generator`: once, for every copy, undone on request, and careful with versions."""

import functools
import importlib.util

import pytest
import torch
import transformers
from lilicorr.candidate_generator import seam
from transformers.generation.utils import GenerationMixin


@pytest.fixture(autouse=True)
def leave_installed():
    yield
    seam.install()


def second_copy():
    spec = importlib.util.spec_from_file_location("another_checkpoints_seam", seam.__file__)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_one_wrap_for_two_copies_and_either_can_undo_it():
    seam.install()
    wrapped = GenerationMixin._get_candidate_generator
    other = second_copy()
    other.install()
    seam.install()
    assert GenerationMixin._get_candidate_generator is wrapped
    other.uninstall()
    assert GenerationMixin._get_candidate_generator is wrapped.__wrapped__
    other.uninstall()  # nothing left to undo
    seam.uninstall()
    assert GenerationMixin._get_candidate_generator is wrapped.__wrapped__


def test_other_assistants_fall_through(llama, prompt):
    ids = prompt(6)
    plain = llama.generate(ids, max_new_tokens=10, do_sample=False)
    assert torch.equal(llama.generate(ids, max_new_tokens=10, do_sample=False, assistant_model=llama), plain)
    assert torch.equal(llama.generate(ids, max_new_tokens=10, do_sample=False, prompt_lookup_num_tokens=3), plain)


def test_anything_with_the_method_is_asked(llama, llama_drafter, prompt):
    class Wrapper:
        config = llama_drafter.config

        def get_candidate_generator(self, target, **request):
            assert set(request) == {"generation_config", "logits_processor", "model_kwargs", "input_ids"}
            return llama_drafter.get_candidate_generator(target, **request)

    ids = prompt(6)
    plain = llama.generate(ids, max_new_tokens=10, do_sample=False)
    assert torch.equal(llama.generate(ids, max_new_tokens=10, do_sample=False, assistant_model=Wrapper()), plain)


@pytest.mark.parametrize("version", ["4.57.1", "5.16.2", "6.0.0", "6.1.0.dev0"])
def test_row_27_28_unknown_version_is_refused_in_one_sentence(monkeypatch, version):
    seam.uninstall()
    monkeypatch.setattr(transformers, "__version__", version)
    with pytest.raises(RuntimeError, match=f"needs transformers >= 5.17 and < 6, found {version}"):
        seam.install()


@pytest.mark.parametrize("version", ["5.17.0", "5.24.0", "5.30.0.dev0"])
def test_row_27_28_known_versions_are_taken(monkeypatch, version):
    seam.uninstall()
    monkeypatch.setattr(transformers, "__version__", version)
    seam.install()
    assert hasattr(GenerationMixin._get_candidate_generator, "__wrapped__")


def test_undo_refuses_to_drop_a_later_wrapper(monkeypatch):
    seam.install()
    ours = GenerationMixin._get_candidate_generator

    @functools.wraps(ours)
    def later(self, *args, **kwargs):
        return ours(self, *args, **kwargs)

    monkeypatch.setattr(GenerationMixin, "_get_candidate_generator", later)
    with pytest.raises(RuntimeError, match="undo that first"):
        seam.uninstall()
    seam.install()
    assert GenerationMixin._get_candidate_generator is later
