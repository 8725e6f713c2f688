"""A recorded call is the call: same output, same figures, and every pass as the loop went through it."""

import pytest
import torch
from lilicorr.evaluation.compare import decoding_options, encode
from lilicorr.evaluation.loading import load_pair
from lilicorr.explain.losses import tally
from lilicorr.explain.trace import record


@pytest.fixture(scope="module", params=["lilicorr", "none", "xpress"])
def pair(request, tiny_folders):
    return load_pair(tiny_folders / "target", {"d": tiny_folders / request.param}, dtype="fp32", device="cpu")


def plain(pair, inputs, count):
    return pair.target.generate(**inputs, **decoding_options(count))[0].tolist()


@pytest.mark.parametrize("lookup", [True, False])
@pytest.mark.parametrize("nodes", [1, 7, 15, None])
def test_the_trace_is_of_the_very_call(pair, nodes, lookup, monkeypatch):
    drafter, target = pair.drafters["d"], pair.target
    monkeypatch.setattr(drafter.config, "max_nodes", nodes)
    monkeypatch.setattr(drafter.config, "lookup", lookup)
    inputs = encode(pair.tokenizer, "abcabcabcab", target.device)
    options = decoding_options(40)
    assisted = target.generate(**inputs, assistant_model=drafter, **options)[0].tolist()
    usual = drafter.last_generation
    call = record(target, drafter, inputs, **options)
    figures = drafter.last_generation
    assert [*call.prompt, *call.tokens] == assisted == plain(pair, inputs, 40)
    assert figures == usual  # watching changes nothing of what is drafted
    drafted = [block for block in call.blocks if block.slots or len(block.nodes) > 1]
    assert figures.drafted_per_block == [len(block.nodes) - 1 for block in drafted]
    assert figures.committed_per_block == [len(block.committed) for block in drafted]
    assert figures.accepted_per_block == [len(block.accepted) for block in drafted]
    assert (call.accepted, call.proposed, len(call.tokens)) == (figures.accepted, figures.drafted, figures.committed)
    assert call.passes - len(drafted) + 1 == figures.plain_steps  # a plain pass commits one token; the prompt's one
    kept = [block.nodes[number].source for block in call.blocks for number in block.accepted]
    assert {source: kept.count(source) for source in set(kept)} == figures.accepted_by_source
    by_slot = [each.accepted for each in tally(call.blocks) if each.accepted]
    assert by_slot == [count for count in figures.accepted_per_slot if count]
    assert lookup or not call.skipped


def test_every_block_follows_from_the_one_before(pair):
    inputs = encode(pair.tokenizer, "hello", pair.target.device)
    call = record(pair.target, pair.drafters["d"], inputs, **decoding_options(32))
    last = call.first
    for block in call.blocks:
        assert block.nodes[0].token == last and block.path[0] == 0
        for number, token in zip(block.path, block.committed, strict=True):
            assert block.nodes[number].said == token
        for number, node in enumerate(block.nodes[1:], 1):
            assert node.parent < number and node.depth == block.nodes[node.parent].depth + 1
            assert 0 <= node.chance <= 1.0001 and 0 < node.sure <= 1.0001
            assert node.source == "text" or node.token in block.slots[node.depth - 1].tokens
        for slot in block.slots:
            assert list(slot.chances) == sorted(slot.chances, reverse=True) and 0 <= slot.pick < len(slot.tokens)
        last = block.committed[-1]
    assert [block.ended for block in call.blocks] == [False] * (call.passes - 1) + [True]


def test_what_the_target_says_off_the_path_is_what_it_would_say(pair):
    inputs = encode(pair.tokenizer, "hello", pair.target.device)
    call = record(pair.target, pair.drafters["d"], inputs, **decoding_options(12))
    before = [*call.prompt, call.first]
    looked_at = 0
    for block in call.blocks:
        for node in block.nodes:
            path, at = [], node
            while at.parent >= 0:
                path.append(at.token)
                at = block.nodes[at.parent]
            logits = pair.target(torch.tensor([before + path[::-1]])).logits[0, -1]
            top = logits.topk(2).values
            if top[0] - top[1] > 1e-3:
                assert node.said == int(logits.argmax())
                looked_at += 1
        before += block.committed
    assert looked_at > 10


def test_a_text_that_repeats_itself_skips_drafts(pair, monkeypatch):
    monkeypatch.setattr("lilicorr.candidate_generator.node_count.NodeCount.skips_draft", lambda *_: True)
    inputs = encode(pair.tokenizer, "abababab", pair.target.device)
    call = record(pair.target, pair.drafters["d"], inputs, **decoding_options(24))
    assert call.skipped > 0 and all(not block.slots for block in call.blocks if block.skipped)
    assert list(call.tokens) == plain(pair, inputs, 24)[len(call.prompt) :]


def test_one_token_and_more_prompts(pair):
    inputs = encode(pair.tokenizer, "abc", pair.target.device)
    call = record(pair.target, pair.drafters["d"], inputs, **decoding_options(1))
    assert (call.passes, len(call.tokens), call.blocks) == (0, 1, [])
    both = {name: torch.cat([part, part]) for name, part in inputs.items()}
    with pytest.raises(ValueError, match="a batch of 2 prompts, but a trace follows a single one"):
        record(pair.target, pair.drafters["d"], both, **decoding_options(4))
