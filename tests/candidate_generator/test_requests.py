"""What cannot work says so in one sentence, before anything is decoded."""

import lilicorr
import pytest
import torch
from lilicorr import LiLiCorrConfig, LiLiCorrModel
from transformers import DynamicCache, MptConfig, MptForCausalLM, T5Config, T5ForConditionalGeneration
from transformers.utils import output_capturing


def refuses(target, drafter, ids, match, error=ValueError, **options):
    options = {"max_new_tokens": 4, "do_sample": False} | options
    with pytest.raises(error, match=match) as caught:
        target.generate(ids, assistant_model=drafter, **options)
    assert "\n" not in str(caught.value)


def test_a_batch_in_transformers_own_loop(llama, llama_drafter, prompt):
    llama_drafter.config.decoding = "stock"
    refuses(llama, llama_drafter, prompt(4).repeat(2, 1), "batch of 2 prompts.*call generate.. once for each prompt")


def test_wrong_vocabulary(new_target, llama_drafter, prompt, tokenizer):
    target = new_target("llama", vocab_size=112)
    refuses(target, llama_drafter, prompt(4), "vocab_size 112, but this drafter was made for a target with 97")
    with pytest.raises(ValueError, match="vocab_size 112, but this drafter was made for a target with 97"):
        ask(target, llama_drafter, prompt(4))


def ask(target, drafter, ids):
    drafter.get_candidate_generator(target, generation_config=target.generation_config, model_kwargs={}, input_ids=ids)


def test_wrong_hidden_size(new_target, llama_drafter, prompt):
    refuses(new_target("llama", hidden_size=64), llama_drafter, prompt(4), "hidden_size 64.*target with 32")


def test_wrong_layer_count(new_target, llama_drafter, prompt):
    refuses(new_target("llama", num_hidden_layers=7), llama_drafter, prompt(4), "num_hidden_layers 7.*target with 4")


def test_encoder_decoder(llama_drafter, prompt):
    config = T5Config(vocab_size=97, d_model=32, d_kv=8, d_ff=32, num_layers=2, num_heads=4, decoder_start_token_id=0)
    refuses(T5ForConditionalGeneration(config), llama_drafter, prompt(4), "is an encoder-decoder.*decoder-only")


def test_target_without_head(llama, llama_drafter, prompt, monkeypatch):
    monkeypatch.setattr(type(llama), "get_output_embeddings", lambda self: None)
    refuses(llama, llama_drafter, prompt(4), "shows no input embedding or no LM head.*causal LM class")


def test_without_cache(llama, llama_drafter, prompt):
    refuses(llama, llama_drafter, prompt(4), "cache, and use_cache is False.*use_cache=True", use_cache=False)


def test_a_target_whose_configuration_keeps_no_cache(prompt):
    """MPT's says so; with `use_cache=True` it works (`test_families.py`)."""
    config = MptConfig(vocab_size=97, d_model=32, n_layers=4, n_heads=4, bos_token_id=1, eos_token_id=2)
    target = MptForCausalLM(config)
    drafter = LiLiCorrModel(LiLiCorrConfig.for_target(config, block_size=4, num_hidden_layers=1, mask_token_id=0))
    for decoding in ("auto", "stock"):
        drafter.config.decoding = decoding
        refuses(target, drafter, prompt(4), "use_cache is False.*configuration; give generate.. use_cache=True")


def test_more_than_one_answer(llama, llama_drafter, prompt):
    out = llama.generate(
        prompt(4), assistant_model=llama_drafter, num_return_sequences=3, do_sample=True, max_new_tokens=6, top_k=0
    )
    assert out.shape == (3, 10) and torch.equal(out[:, :4], prompt(4).expand(3, 4))
    llama_drafter.config.decoding = "stock"
    refuses(llama, llama_drafter, prompt(4), "batch of 2 prompts", num_return_sequences=2, do_sample=True)


def test_beam_search_is_plain_beam_search(llama, llama_drafter, prompt):
    """Transformers warns, leaves the drafter out and never asks it, so its result is exactly beam search's."""
    ids = prompt(4)
    plain = llama.generate(ids, max_new_tokens=8, num_beams=3, do_sample=False)
    llama_drafter.last_generation = None
    out = llama.generate(ids, max_new_tokens=8, num_beams=3, do_sample=False, assistant_model=llama_drafter)
    assert torch.equal(out, plain)
    assert llama_drafter.last_generation is None


def test_cache_that_cannot_be_cropped(llama, llama_drafter, prompt):
    class Uncroppable(DynamicCache):
        is_croppable = False

        def crop(self, *args, **kwargs):
            raise ValueError("this cache cannot be cropped")

    name = "cache" if hasattr(output_capturing, "selected_hidden_states") else "past_key_values"
    refuses(llama, llama_drafter, prompt(4), "cropped", **{name: Uncroppable(config=llama.config)})


def test_a_processor_with_a_state_works_in_the_loop_and_is_refused_in_transformers_own(llama, llama_drafter, prompt):
    """That one would be asked about drafted tokens that are then dropped, and say something else afterwards."""
    options = {"max_new_tokens": 12, "do_sample": False, "guidance_scale": 1.5}
    plain = llama.generate(prompt(4), **options)
    assert torch.equal(llama.generate(prompt(4), assistant_model=llama_drafter, **options), plain)
    llama_drafter.config.decoding = "stock"
    refuses(
        llama, llama_drafter, prompt(4), "keeps a state that Transformers' assisted loop spoils", guidance_scale=1.5
    )


@pytest.mark.parametrize("decoding", ["auto", "stock"])
@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
        {
            "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64,
            "short_factor": [1.0] * 4, "long_factor": [4.0] * 4,
        },
        {"rope_type": "default", "rope_theta": 1e4},
    ],
)  # fmt: skip
def test_frequencies_that_follow_the_length_are_told(new_target, new_drafter, prompt, monkeypatch, rope, decoding):
    told = []
    monkeypatch.setattr("lilicorr.candidate_generator.requests.logger.warning_once", told.append)
    target = new_target("llama", rope_parameters=rope)
    drafter = new_drafter(
        target, "none", decoding=decoding, rope_parameters={"rope_type": "default", "rope_theta": 1e4}
    )
    for call in (
        lambda: target.generate(prompt(4), assistant_model=drafter, max_new_tokens=4, do_sample=False),
        lambda: lilicorr.generate(target, drafter, [[5, 6]], max_new_tokens=4, do_sample=False),
    ):
        told.clear()
        call()
        if rope["rope_type"] == "default":
            assert told == []
        else:
            (sentence,) = set(told)  # the same words, which Transformers' logger then says once
            assert repr(rope["rope_type"]) in sentence and "part from plain generate()'s" in sentence
