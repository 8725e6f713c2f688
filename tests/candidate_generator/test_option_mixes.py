"""Any mix of `generate`'s options gives what plain `generate` gives, whatever is drafted.

`LILICORR_MIXES` asks for another number of mixes than 200, drawn anew each time or by `--hypothesis-seed`.
"""

import inspect
import os

import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st
from transformers import DynamicCache, LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList
from transformers.cache_utils import StaticLayer
from transformers.generation.streamers import BaseStreamer

from .conftest import build_drafter, build_target, teach_drafter

MIXES = os.environ.get("LILICORR_MIXES")
ENDS = [[5, 9, 20], [16], [7, 8, 44, 61]]


class Counts(LogitsProcessor):
    """Has a state: the more often it was asked, the likelier some tokens."""

    def __init__(self):
        self.asked = 0

    def __call__(self, input_ids, scores):
        self.asked += 1
        scores[:, (self.asked * 7) % scores.shape[1]] += 3.0
        return scores


class EndsRows(StoppingCriteria):
    """Ends a row whose last two tokens add up to a multiple of seven."""

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids[:, -2:].sum(dim=1) % 7 == 0


class Puts(BaseStreamer):
    def __init__(self):
        self.given = []

    def put(self, value):
        self.given.append(value.reshape(-1).tolist())

    def end(self):
        self.given.append("end")


VALUES = {
    "repetition_penalty": [1.3, 0.8],
    "no_repeat_ngram_size": [2, 3],
    "encoder_no_repeat_ngram_size": [2],
    "encoder_repetition_penalty": [1.4],
    "min_new_tokens": [1, 4, 8],
    "bad_words_ids": [[[54], [33, 33]]],
    "suppress_tokens": [[10, 54]],
    "begin_suppress_tokens": [[3, 4, 11, 72]],
    "forced_bos_token_id": [4],
    "forced_eos_token_id": [5],
    "exponential_decay_length_penalty": [(3, 1.2)],
    "eos_token_id": ENDS,
    "prefix_allowed_tokens_fn": [lambda row, ids: [t for t in range(97) if (t + row + len(ids)) % 5]],
    "sequence_bias": [{(11,): 3.0, (12, 13): 2.0}],
    "guidance_scale": [1.3],
    "renormalize_logits": [True],
    "remove_invalid_values": [True],
    "prefill_chunk_size": [3],
    "cache_implementation": ["static", "dynamic"],
    "stop_strings": [["A"], ["x", "Qz", "b"]],
    "max_time": [1000.0],
}


@st.composite
def mixes(draw):
    """Up to six options at a time, and how many tokens."""
    names = draw(st.lists(st.sampled_from(sorted(VALUES)), max_size=6, unique=True))
    new = draw(st.integers(1, 24))
    return {"max_new_tokens": new} | {name: draw(st.sampled_from(VALUES[name])) for name in names}


def decided(scores):
    """Whether no step's first two tokens are as good as tied: rounding over more rows may then choose either."""
    first, second = torch.stack(scores).topk(2, dim=-1).values.unbind(-1)
    return not bool(((first - second).abs() < 1e-4).any())


@settings(
    max_examples=int(MIXES or 200),
    deadline=None,
    derandomize=MIXES is None,
    phases=[Phase.explicit, Phase.generate],  # a mix that differs is told as it is: making it simpler takes minutes
    suppress_health_check=list(HealthCheck),
)
@given(
    options=mixes(),
    rows=st.sampled_from([1, 1, 2, 2, 3, 4, 5, 16]),
    seed=st.integers(0, 10_000),
    kind=st.sampled_from(["llama", "qwen3", "sliding"]),
    head=st.sampled_from(["none", "lilicorr", "dcoco", "xpress"]),
    nodes=st.sampled_from([None, 0, 1, 3, 7, 20]),
    lookup=st.booleans(),
    outputs=st.booleans(),
    own=st.sampled_from(["", "", "processor", "criterion", "streamer"]),
    prompt=st.sampled_from(["ids", "ids", "embeds", "cached"]),
    right=st.booleans(),
)
def test_any_mix_of_options_is_plain(
    many, tokenizer, options, rows, seed, kind, head, nodes, lookup, outputs, own, prompt, right
):
    target, make = many[kind]
    drafter = make(head)
    drafter.config.max_nodes, drafter.config.lookup = nodes, lookup
    generator = torch.Generator().manual_seed(seed)
    length = int(torch.randint(1, 12, (), generator=generator))
    ids = torch.randint(1, 97, (rows, length), generator=generator)
    mask = (torch.arange(length) >= torch.randint(0, length, (rows, 1), generator=generator)).long()
    call = {"attention_mask": mask, "do_sample": False, "pad_token_id": 0, "input_ids": ids} | options
    if call.get("cache_implementation") == "static" and (kind == "sliding" or not StaticLayer.is_croppable):
        del call["cache_implementation"]  # a full window cannot be cropped, nor can any in old releases: refused
    if "exponential_decay_length_penalty" in call:
        call.setdefault("eos_token_id", ENDS[0])
    if "stop_strings" in call:
        call["tokenizer"] = tokenizer
    if prompt == "embeds" and not any("encoder" in name or "guidance" in name for name in call):
        call.pop("prefill_chunk_size", None)  # which splits ids only
        call["inputs_embeds"] = target.get_input_embeddings()(call.pop("input_ids")).detach()
    if prompt == "cached" and length > 1:
        call["attention_mask"] = mask = torch.ones_like(mask)
        call.pop("prefill_chunk_size", None)
        call.pop("cache_implementation", None)

    def ask(**extra):
        if own == "processor":
            extra["logits_processor"] = LogitsProcessorList([Counts()])
        if own == "criterion":
            extra["stopping_criteria"] = StoppingCriteriaList([EndsRows()])
        if own == "streamer":
            extra["streamer"] = Puts()
        if prompt == "cached" and length > 1:
            cache = DynamicCache(config=target.config)
            name = "cache" if "cache" in inspect.signature(target.forward).parameters else "past_key_values"
            extra[name] = cache
            with torch.no_grad():
                target(ids[:, : length // 2], **{name: cache})
        return target.generate(**call, **extra), getattr(extra.get("streamer"), "given", None)

    plain, told = ask(return_dict_in_generate=True, output_scores=True, output_logits=True)
    assume(decided(plain.scores))
    sequences = plain.sequences
    if right and "inputs_embeds" not in call:
        real = torch.nn.functional.pad(mask, (0, sequences.shape[1] - length), value=1).bool()
        teach_drafter(drafter, [row[given] for row, given in zip(sequences, real, strict=True)], wrong_slots=(4,))
    wanted = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    wanted["output_hidden_states"] = rows < 3
    ours, heard = ask(assistant_model=drafter, **(wanted if outputs else {}))
    assert heard == told
    if not outputs:
        assert torch.equal(ours, sequences)
        return
    assert torch.equal(ours.sequences, plain.sequences)
    made = [row.committed for row in ours.figures.rows or [ours.figures]]
    for name in ("scores", "logits"):
        assert len(ours[name]) == len(plain[name])
        for step, (left, right_one) in enumerate(zip(ours[name], plain[name], strict=True)):
            going = torch.tensor([step < each for each in made])  # a row that has ended is given zeros here
            torch.testing.assert_close(left[going], right_one[going], rtol=1e-3, atol=1e-3, equal_nan=True)


@pytest.fixture(scope="module")
def many(_targets):
    window = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 0}
    targets = _targets | {"sliding": build_target("qwen3", **window)}
    return Pairs(targets)


class Pairs(dict):
    """Targets and how to make their drafters; short where hypothesis prints it."""

    def __getitem__(self, kind):
        target = super().__getitem__(kind)
        return target, lambda head: build_drafter(target, head)

    def __repr__(self):
        return "Pairs"
