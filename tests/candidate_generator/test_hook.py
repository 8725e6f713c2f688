"""The wraps around Transformers: once, for every copy, undone on request, and careful with versions."""

import functools
import importlib.util

import pytest
import torch
from lilicorr.candidate_generator import hook, transformers_api
from transformers.generation.utils import GenerationMixin
from transformers.pipelines import base as pipelines

METHODS = ("_validate_generation_mode", "_assisted_decoding", "_get_candidate_generator")
PLACES = [(GenerationMixin, name) for name in METHODS] + [(pipelines, "load_assistant_model")]


@pytest.fixture(autouse=True)
def leave_installed():
    yield
    hook.install()


def second_copy():
    """The hook as another checkpoint's remote code brings it."""
    spec = importlib.util.spec_from_file_location("lilicorr.candidate_generator.another_hook", hook.__file__)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def wrapped():
    return [getattr(owner, name) for owner, name in PLACES]


def test_one_wrap_for_two_copies_and_either_can_undo_it():
    hook.install()
    ours = wrapped()
    other = second_copy()
    other.install()
    hook.install()
    assert wrapped() == ours
    other.uninstall()
    assert wrapped() == [each.__wrapped__ for each in ours]
    other.uninstall()  # nothing left to undo
    hook.uninstall()
    assert wrapped() == [each.__wrapped__ for each in ours]


def test_a_copy_that_wrapped_one_method_is_joined(monkeypatch):
    """An older checkpoint's code knows the candidate generator's method only."""
    hook.uninstall()
    monkeypatch.setattr(hook, "_WRAPPERS", {"_get_candidate_generator": hook._WRAPPERS["_get_candidate_generator"]})
    hook.install()
    monkeypatch.undo()
    old = GenerationMixin._get_candidate_generator
    hook.install()
    assert GenerationMixin._get_candidate_generator is old
    assert all(hasattr(each, "__wrapped__") for each in wrapped())


def test_other_assistants_fall_through(llama, prompt):
    ids = prompt(6)
    plain = llama.generate(ids, max_new_tokens=10, do_sample=False)
    assert torch.equal(llama.generate(ids, max_new_tokens=10, do_sample=False, assistant_model=llama), plain)
    assert torch.equal(llama.generate(ids, max_new_tokens=10, do_sample=False, prompt_lookup_num_tokens=3), plain)


def test_anything_that_offers_candidates_is_asked_by_transformers_loop(llama, llama_drafter, prompt):
    class Wrapper:
        config = llama_drafter.config

        def get_candidate_generator(self, target, **request):
            assert set(request) == {"generation_config", "logits_processor", "model_kwargs", "input_ids"}
            return llama_drafter.get_candidate_generator(target, **request)

    ids = prompt(6)
    plain = llama.generate(ids, max_new_tokens=10, do_sample=False)
    assert torch.equal(llama.generate(ids, max_new_tokens=10, do_sample=False, assistant_model=Wrapper()), plain)


def test_anything_that_offers_to_decode_is_handed_the_call(llama, llama_drafter, prompt):
    class Decoder:
        config = llama_drafter.config

        def decode(self, target, input_ids, **call):
            assert {"logits_processor", "stopping_criteria", "generation_config"} <= set(call)
            return input_ids[:, :1]

    ids = prompt(6)
    assert torch.equal(llama.generate(ids, max_new_tokens=10, assistant_model=Decoder()), ids[:, :1])


def test_stock_decoding_is_transformers_own(llama, llama_drafter, prompt, monkeypatch):
    monkeypatch.setattr("lilicorr.modeling_lilicorr.modeling_lilicorr.decode", None)
    llama_drafter.config.decoding = "stock"
    ids = prompt(6)
    plain = llama.generate(ids, max_new_tokens=10, do_sample=False)
    assert torch.equal(llama.generate(ids, max_new_tokens=10, do_sample=False, assistant_model=llama_drafter), plain)
    assert llama_drafter.last_generation.committed == 10


@pytest.mark.parametrize("version", ["4.57.1", "5.16.2", "6.0.0", "6.1.0.dev0"])
def test_an_unknown_version_is_refused_in_one_sentence(monkeypatch, version):
    hook.uninstall()
    monkeypatch.setattr(transformers_api.transformers, "__version__", version)
    with pytest.raises(RuntimeError, match=f"needs transformers >= 5.17 and < 6, found {version}"):
        hook.install()


@pytest.mark.parametrize("version", ["5.17.0", "5.24.0", "5.30.0.dev0"])
def test_known_versions_are_taken(monkeypatch, version):
    hook.uninstall()
    monkeypatch.setattr(transformers_api.transformers, "__version__", version)
    transformers_api.check_version()
    hook.install()
    assert all(hasattr(each, "__wrapped__") for each in wrapped())


@pytest.mark.parametrize("owner, name", [*PLACES, (GenerationMixin, "_prefill")])
def test_a_release_without_one_of_them_says_so(monkeypatch, owner, name):
    hook.uninstall()
    monkeypatch.delattr(owner, name)
    with pytest.raises(RuntimeError, match=f"has no {owner.__name__}.{name}, which drafting inside generate"):
        hook.install()


def test_undo_refuses_to_drop_a_later_wrapper(monkeypatch):
    hook.install()
    ours = GenerationMixin._assisted_decoding

    @functools.wraps(ours)
    def later(self, *args, **kwargs):
        return ours(self, *args, **kwargs)

    monkeypatch.setattr(GenerationMixin, "_assisted_decoding", later)
    with pytest.raises(RuntimeError, match="undo that first"):
        hook.uninstall()
    hook.install()
    assert GenerationMixin._assisted_decoding is later
