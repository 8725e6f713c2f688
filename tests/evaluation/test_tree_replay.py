import pytest
import torch
from lilicorr.evaluation.arms import configured
from lilicorr.evaluation.compare import answer, decoding_options, encode
from lilicorr.evaluation.loading import load_pair
from lilicorr.evaluation.replay import Text, drafts_along
from lilicorr.evaluation.tree_replay import Drafts, TreeTrace, follow_trees, suffix_hits
from lilicorr.evaluation.tree_report import tree_tables, tree_view
from lilicorr.modeling_lilicorr.lattice import Draft, Lattice
from lilicorr.training.decode import stop_ids
from lilicorr.training.target import target_pass

PROMPTS = ("abc", "hello there hello", "x = 1", "3 + 4", "q")
TAUGHT = 6  # candidates of a taught head
NEVER = 263  # a token that is never said


@pytest.fixture(scope="module")
def pair(tiny_folders):
    drafters = {name: tiny_folders / name for name in ("lilicorr", "none", "xpress")}
    return load_pair(tiny_folders / "target", drafters, dtype="fp32", device="cpu")


def known(prompt, said, ended):
    start = prompt["input_ids"].shape[1]
    return Text([*prompt["input_ids"][0].tolist(), *said], start, start + len(said), ended)


def drafts_of(pair, drafter, text):
    target_hidden = target_pass(pair.target, torch.tensor([text.token_ids]), drafter.config.target_layer_ids)[0]
    return Drafts(drafter, drafts_along(pair.target, drafter, text, target_hidden))


def teach(monkeypatch, drafter, follows):
    """Have the head foretell `follows [vocab]`: the token that mostly comes next, among others, not always first.

    Returns a list that gets a number of rows with every draft.
    """
    drafted = []

    def foretell(block, return_lattice=False):
        drafted.append(block.anchor_ids.shape[0])
        rows, slots = block.anchor_ids.shape[0], block.hidden.shape[1]
        token, candidates, log_probs = block.anchor_ids, [], []
        for slot in range(slots):
            likely = follows[token]
            # Which rank it has and how sure the drafter is: by chance, but of the token and slot alone.
            shift = (likely * 7 + slot * 3) % 3
            others = (likely[:, None] + torch.arange(TAUGHT)) % 256
            candidates.append(others.gather(1, (torch.arange(TAUGHT) - shift[:, None]) % TAUGHT))
            sure = 0.3 + 0.6 * ((likely * 5 + slot) % 11)[:, None] / 11
            log_probs.append((sure.log() - 0.7 * torch.arange(TAUGHT)) - 1e-3 * others.float() / 256 - 0.7)
            token = likely
        tokens, chances = torch.stack(candidates, dim=1), torch.stack(log_probs, dim=1)
        scores = torch.cos(tokens[:, :-1, :, None] * 1.3 + tokens[:, 1:, None] * 2.1)
        lattice = Lattice(tokens, chances, chances[:, 0], scores, torch.zeros(rows, slots, dtype=torch.long))
        picked = tokens[..., 0]
        return Draft(picked, torch.ones_like(picked, dtype=torch.bool), lambda: chances[..., 0].exp(), lattice)

    monkeypatch.setattr(drafter.head, "draft", foretell)
    return drafted


def real(pair, drafter, prompt, nodes, lookup, **options):
    """What a call of `generate` with trees says and counts."""
    with configured(drafter, {"decoding": "auto", "lookup": lookup, "max_nodes": nodes}):
        said = answer(pair.target, prompt, drafter, **options).token_ids
    return said, drafter.last_generation


def assert_same(trace, figures):
    assert trace.passes == figures.blocks + figures.plain_steps - 1  # the prompt's pass is a plain step
    assert trace.committed == figures.committed - 1
    assert trace.drafted == figures.drafted
    assert trace.sources == {source: count for source, count in figures.accepted_by_source.items() if count}
    slots = [count for count in figures.accepted_per_slot if count]
    assert trace.reached == slots and sum(trace.nodes) == trace.drafted


@pytest.mark.parametrize("head", ["lilicorr", "none", "xpress"])
@pytest.mark.parametrize("nodes, lookup", [(3, True), (15, True), (7, False)])
def test_trees_commit_what_they_do_in_a_real_run(pair, head, nodes, lookup):
    drafter = pair.drafters[head]
    for count in (2, 3, 31):
        for prompt in (encode(pair.tokenizer, text, pair.target.device) for text in PROMPTS[:3]):
            options = decoding_options(count) | {"min_new_tokens": count}
            said, figures = real(pair, drafter, prompt, nodes, lookup, **options)
            text = known(prompt, said, ended=False)
            trace = follow_trees(text, nodes, drafts_of(pair, drafter, text), lookup, stop_ids(pair.target))
            assert_same(trace, figures)


@pytest.mark.parametrize("nodes, lookup", [(3, True), (31, True), (15, False)])
def test_trees_of_a_drafter_that_is_often_right_commit_what_they_do_in_a_real_run(pair, monkeypatch, nodes, lookup):
    drafter, sources, ends = pair.drafters["lilicorr"], set(), 0
    follows = torch.zeros(pair.target.config.vocab_size, dtype=torch.long)
    drafted = teach(monkeypatch, drafter, follows)
    for prompt in (encode(pair.tokenizer, text, pair.target.device) for text in PROMPTS):
        whole = answer(pair.target, prompt, **decoding_options(40)).token_ids
        follows[list(whole[:-1])] = torch.tensor(whole[1:])
        for end in [*list(dict.fromkeys(whole[2:]))[::9], NEVER]:
            options = decoding_options(60) | {"eos_token_id": end}
            drafted.clear()
            said, figures = real(pair, drafter, prompt, nodes, lookup, **options)
            if len(said) < 2:
                continue
            ran = len(drafted)
            text = known(prompt, said, ended=said[-1] == end)
            trace = follow_trees(text, nodes, drafts_of(pair, drafter, text), lookup, {end})
            assert_same(trace, figures)
            assert trace.drafts == ran
            sources |= set(trace.sources)
            ends += figures.blocks and figures.accepted_per_block[-1] == figures.committed_per_block[-1]
    assert ends > 0 and sources == ({"lattice", "text", "both"} if lookup else {"lattice"})


ONCE = [10, 11, 12, 13, 14, 15, 16, 17, 18, 19]  # no token twice
LOOP = [20, 21, 22, 23, 24, 25, 26]  # longer than the suffixes that are looked up


def scripted(script):
    """An option of `generate` that makes it say `script`."""
    return {"prefix_allowed_tokens_fn": lambda batch, ids: [[*script, NEVER][min(len(ids) - 1, len(script))]]}


@pytest.mark.parametrize("lookup", [True, False])
@pytest.mark.parametrize("nodes", [1, 7])
@pytest.mark.parametrize("script", [ONCE + LOOP * 4, [*ONCE, *LOOP, *LOOP, 30, *LOOP, 31, *LOOP]])
def test_replay_skips_the_drafts_that_a_real_run_skips(pair, monkeypatch, script, nodes, lookup):
    drafter = pair.drafters["lilicorr"]
    drafted = teach(monkeypatch, drafter, torch.arange(pair.target.config.vocab_size).roll(-1))
    prompt = {"input_ids": torch.tensor([[5]]), "attention_mask": torch.ones(1, 1, dtype=torch.long)}
    options = decoding_options(len(script)) | scripted(script)
    said, figures = real(pair, drafter, prompt, nodes, lookup, **options)
    ran = len(drafted)
    assert list(said) == script and (ran < figures.blocks) == lookup
    text = known(prompt, said, ended=False)
    trace = follow_trees(text, nodes, drafts_of(pair, drafter, text), lookup, stop_ids(pair.target))
    assert_same(trace, figures)
    assert trace.drafts == ran


@pytest.mark.parametrize(
    "answer, drafted",
    [
        (ONCE, range(9)),
        # Behind five tokens that stood there before the text is sure; until then it is right with a token a pass.
        (ONCE + LOOP * 3, [*range(18), 19]),
        # Wrong once, it is believed again only when it has been right more often.
        ([*ONCE, *LOOP, *LOOP, 30, *LOOP], [*range(18), 19, 24, 25, 27, 29]),
    ],
    ids=["no token twice", "a loop", "a loop that broke"],
)
def test_a_draft_is_skipped_where_the_text_is_sure_and_only_there(answer, drafted):
    class Wrong:
        beta, num_slots, behind_tokens = 1.0, 4, ()

        def behind(self, index):
            self.behind_tokens += (index,)
            tokens = torch.full((1, 4), NEVER)
            return Draft(tokens, torch.ones(1, 4, dtype=torch.bool), lambda: torch.full((1, 4), 0.01), None)

    drafts = Wrong()
    trace = follow_trees(Text([5, *answer], 1, 1 + len(answer), True), 1, drafts)
    assert list(drafts.behind_tokens) == list(drafted) and trace.drafts == len(drafted)
    drafts = Wrong()
    trace = follow_trees(Text([5, *answer], 1, 1 + len(answer), True), 1, drafts, lookup=False)
    assert list(drafts.behind_tokens) == list(range(len(answer) - 1)) and trace.drafts == trace.passes


def test_the_texts_own_continuation_alone_needs_no_drafter():
    # prompt "1 2 3 4 1", answer "2 3 4 1 2 9 1 2 3": each pass goes on as behind the latest equal suffix.
    text = Text([1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 9, 1, 2, 3], 5, 14, False)
    trace = follow_trees(text, 3, None)
    # Behind the first 2: 3 4 1, right, and the target's own 2. Behind that 3 …, wrong: the target's 9, behind which
    # nothing is known: 1. Behind that 2 and the target's 3, for a limit leaves the last token to the target.
    assert (trace.passes, trace.committed) == (4, 8)
    assert trace.reached == [2, 1, 1] and trace.sources == {"text": 4}
    assert follow_trees(text, 0, None) == TreeTrace(8, 8)


def test_more_nodes_never_bring_less_on_a_fixed_lattice(pair, monkeypatch):
    drafter = pair.drafters["lilicorr"]
    prompt = encode(pair.tokenizer, "hello there hello", pair.target.device)
    said = answer(pair.target, prompt, **decoding_options(60)).token_ids
    follows = torch.zeros(pair.target.config.vocab_size, dtype=torch.long)
    follows[list(said[:-1])] = torch.tensor(said[1:])
    teach(monkeypatch, drafter, follows)
    text = known(prompt, said, ended=False)
    drafts = drafts_of(pair, drafter, text)
    gained = [follow_trees(text, nodes, drafts, False).tokens_per_pass for nodes in (1, 3, 7, 15, 31, 63)]
    assert gained == sorted(gained) and gained[-1] > gained[0] > 1


def test_suffixes_are_asked_behind_every_token():
    text = Text([1, 2, 3, 1, 2, 3, 1, 9], 4, 8, False)  # answer 2 3 1 9
    # Behind "1 2" comes 3, right; behind "1 2 3" 1, right; behind "1 2 3 1" 2, wrong.
    assert suffix_hits(text) == {1: (0, 0), 2: (1, 1), 3: (1, 1), 4: (0, 1), 5: (0, 0)}


def test_report_pools_passes_by_set_and_averages_sets():
    def trace(passes, committed, **sources):
        reached = [sum(sources.values())]
        return {
            "passes": passes,
            "committed": committed,
            "drafts": passes,
            "drafted": 3 * passes,
            "reached": reached,
            "nodes": [3 * passes],
            "sources": sources,
        }

    def row(*given, **sources):
        traces = {"3": trace(*given, **sources)}
        return {
            "trees": {"a": {"without text": traces, "with text": traces}},
            "lookup": traces,
            "suffixes": {"1": [1, 4]},
        }

    sets = {"x": [row(10, 20, lattice=10), row(10, 40, both=30)], "y": [row(20, 20)]}
    view = tree_view(sets, {"a": {"x": 1.5, "y": 2.5}})
    figures = view["trees"]["a"]["with text"]["3"]
    assert figures["sets"] == {"x": 3.0, "y": 1.0} and figures["average"] == 2.0
    assert figures["reached"] == [1.0] and figures["nodes"] == [3.0]
    assert figures["sources"] == {"lattice": 0.125, "text": 0.0, "both": 0.375}
    assert view["suffixes"] == {"1": {"right": 3, "asked": 12}}
    tables = tree_tables(view)
    assert (
        "| 3 | 2.00 | 2.00 | 2.00 |"
        in tables["Tokens a pass of `a` by nodes of a tree, averages over sets; its own draft: 2.00"]
    )
    assert "| 1 | 0.25 | 0.20 | 12 |" in "".join(tables.values())
    assert "| with text | 3 | 1.00 (3.0) |" in "".join(tables.values())
    assert "| with text | 3 | 12.5% | 0.0% | 37.5% | 50.0% | 100.0% |" in "".join(tables.values())
    assert tree_view({"x": [{}]}, {}) == {} and tree_tables({}) == {}
