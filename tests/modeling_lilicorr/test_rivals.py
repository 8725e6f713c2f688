"""The rivals' heads: their papers' sizes, fresh behaviour, and drafts equal to a naive slot-by-slot version."""

import math

import pytest
import torch
from lilicorr import LiLiCorrConfig, LiLiCorrModel
from lilicorr.modeling_lilicorr.head_settings import HEAD_TYPES, default_head_config
from lilicorr.modeling_lilicorr.heads import HEADS
from lilicorr.modeling_lilicorr.lattice import Block
from torch.nn import functional as F

VOCAB, DIM, SLOTS = 61, 24, 6
DSPARK = {"markov_rank": 10, "enable_confidence_head": True, "confidence_head_with_markov": True}
TINY = {
    "dcoco": ("dcoco", {"num_candidates": 5, "width": 12, "hidden_size": 14}),
    "domino": ("domino", {"gru_hidden_dim": 18, "emb_dim": 10, "pure_draft_prefix_len": 1}),
    "domino-2": ("domino", {"gru_hidden_dim": 18, "emb_dim": 10, "pure_draft_prefix_len": 2}),
    "vanilla": ("dspark", DSPARK | {"markov_head_type": "vanilla"}),
    "gated": ("dspark", DSPARK | {"markov_head_type": "gated"}),
    "rnn": ("dspark", DSPARK | {"markov_head_type": "rnn"}),
    "selector": ("selector", {"num_candidates": 5, "rank": 10}),
    "xpress": ("xpress", {"rank": 10, "mlp_ratio": 3, "num_jacobi_passes": SLOTS}),
}


def tiny_config(head_type: str, head_config: dict | None, **overrides) -> LiLiCorrConfig:
    settings = {
        "vocab_size": VOCAB,
        "hidden_size": DIM,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "block_size": SLOTS + 1,
        "mask_token_id": VOCAB - 1,
        "target_layer_ids": [1, 3],
        "num_target_layers": 6,
        "head_type": head_type,
        "head_config": head_config,
    }
    return LiLiCorrConfig(**settings | overrides)


def lively(name: str, seed: int = 0) -> LiLiCorrModel:
    """A model whose every head parameter is random: nothing hides behind a zero."""
    torch.manual_seed(seed)
    model = LiLiCorrModel(tiny_config(*TINY[name])).eval()
    with torch.no_grad():
        for parameter in model.head.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.5)
    return model


def random_block(slots: int = SLOTS, blocks: int = 4, seed: int = 1) -> Block:
    generator = torch.Generator().manual_seed(seed)
    table = torch.randn(VOCAB, DIM, generator=generator)
    hidden = torch.randn(blocks, slots, DIM, generator=generator)
    logits = torch.randn(blocks, slots, VOCAB, generator=generator) * 2
    anchors = torch.randint(0, VOCAB, (blocks,), generator=generator)
    state, row = torch.randn(2, blocks, DIM, generator=generator)
    return Block(hidden, logits, anchors, state, None, lambda ids: table[ids], None, row)


def draft(model: LiLiCorrModel, block: Block, **options):
    with torch.no_grad():
        return model.head.draft(block, **options)


# --- sizes and names --------------------------------------------------------------------------------------------------

SIZES = [
    ("domino", {}, 4096, 55_934_976),  # 55.93 M
    ("domino", {}, 2560, 50_823_168),  # 50.82 M
    ("dspark", {}, 4096, 77_795_585),  # 77.80 M
    ("dspark", {}, 2560, 77_794_049),
    ("dspark", {"enable_confidence_head": False}, 4096, 2 * 151_936 * 256),
    ("dspark", {"confidence_head_with_markov": False}, 4096, 77_795_585 - 256),
    ("dspark", {"markov_head_type": "gated"}, 4096, 77_795_585 + (4096 + 256) * 256 + 256),
    ("dspark", {"markov_head_type": "rnn"}, 4096, 77_795_585 + (4096 + 512) * 768 + 768),
    ("dcoco", {}, 4096, 2_229_249),  # 2.23 M
    ("selector", {}, 4096, 77_791_232 + 256 * 4096),
    ("xpress", {}, 4096, 77_791_232 + 2 * 256 * 4096 + (3 + 16 * 16 / 256 + 3 * 2) * 256 * 256),  # 80.54 M
    ("xpress", {}, 2560, 79_757_312),
    ("xpress", {"mlp_ratio": 4}, 2560, 79_757_312 + 6 * 256 * 256),
]


@pytest.mark.parametrize("head_type,changes,hidden,total", SIZES)
def test_a_head_has_its_papers_parameter_count(head_type: str, changes: dict, hidden: int, total: int) -> None:
    config = LiLiCorrConfig(
        hidden_size=hidden, head_type=head_type, head_config=default_head_config(head_type, hidden) | changes
    )
    config.validate()
    with torch.device("meta"):
        head = HEADS[head_type](config)
    assert sum(parameter.numel() for parameter in head.parameters()) == total
    assert not list(head.buffers())


NAMES = {  # of the runtimes that train or serve these heads
    "domino": {
        "prefix_gru.weight_ih_l0": (3072, 4096),
        "prefix_gru.weight_hh_l0": (3072, 1024),
        "embed_proj.0.weight": (256, 5120),
        "embed_proj.2.weight": (151936, 256),
    },
    "dspark": {
        "markov_head.markov_w1.weight": (151936, 256),
        "markov_head.markov_w2.weight": (151936, 256),
        "confidence_head.proj.weight": (1, 4352),
        "confidence_head.proj.bias": (1,),
    },
    "selector": {
        "predecessor_codebook": (151936, 256),
        "successor_codebook": (151936, 256),
        "hidden_projection.weight": (256, 4096),
    },
    "xpress": {
        "token_embed.weight": (151936, 256),
        "down_h.weight": (256, 4096),
        "down_g.weight": (256, 4096),
        "in_proj.weight": (256, 768),
        "mix_l": (256, 16, 16),
        "mlp_gate.weight": (512, 256),
        "mlp_up.weight": (512, 256),
        "mlp_down.weight": (256, 512),
        "readout.weight": (151936, 256),
    },
}


@pytest.mark.parametrize("head_type", NAMES)
def test_a_heads_tensors_have_the_names_of_its_authors(head_type: str) -> None:
    with torch.device("meta"):
        head = HEADS[head_type](LiLiCorrConfig(head_type=head_type))
    assert {name: tuple(tensor.shape) for name, tensor in head.state_dict().items()} == NAMES[head_type]


def test_every_head_type_has_a_class() -> None:
    assert set(HEADS) == set(HEAD_TYPES)


BAD = {
    "rank": ("dspark", {"markov_rank": 0}, "markov_rank must be positive, got 0"),
    "kind": ("dspark", {"markov_head_type": "lstm"}, "markov_head_type is 'lstm', expected one of vanilla, gated, rnn"),
    "prefix": ("domino", {"pure_draft_prefix_len": -1}, "pure_draft_prefix_len is -1, expected 0 or more"),
    "state": ("domino", {"gru_hidden_dim": 0}, "gru_hidden_dim must be positive"),
    "K": ("dcoco", {"num_candidates": 62}, "num_candidates is 62, expected 1 to the vocabulary's 61"),
    "half": ("domino", {"emb_dim": 2.5}, "emb_dim is 2.5, expected a whole number"),
    "text": ("dcoco", {"width": "4"}, "width is '4', expected a whole number"),
    "codes": ("selector", {"rank": -1}, "rank must be positive, got -1"),
    "passes": ("xpress", {"num_jacobi_passes": 0}, "num_jacobi_passes must be positive, got 0"),
    "ratio": ("xpress", {"mlp_ratio": 1.5}, "mlp_ratio is 1.5, expected a whole number"),
    "lacking": ("selector", {"rank": None}, "head_config lacks rank;"),
}


@pytest.mark.parametrize("head_type,changes,sentence", BAD.values(), ids=BAD.keys())
def test_settings_that_cannot_work_are_refused_in_one_sentence(head_type: str, changes: dict, sentence: str) -> None:
    config = tiny_config(head_type, default_head_config(head_type, DIM) | changes)
    with pytest.raises(ValueError, match=sentence):
        LiLiCorrModel(config)


# --- drafts, slot by slot from the definitions ------------------------------------------------------------------------


def naive_domino(w: dict, settings: dict, block: Block, n: int) -> list[int]:
    gru = torch.nn.GRU(DIM, settings["gru_hidden_dim"], bias=False)
    gru.load_state_dict({name.removeprefix("prefix_gru."): w[name] for name in w if name.startswith("prefix_gru")})
    tokens = [int(block.anchor_ids[n])]
    for s in range(block.hidden.shape[1]):
        logits = block.logits[n, s]
        if s >= settings["pure_draft_prefix_len"]:
            state = gru(block.embed(torch.tensor(tokens)))[0][-1]  # has read every token so far
            code = F.silu(w["embed_proj.0.weight"] @ torch.cat([block.hidden[n, s], state]))
            logits = logits + w["embed_proj.2.weight"] @ code
        tokens.append(int(logits.argmax()))
    return tokens[1:]


def naive_dspark(w: dict, settings: dict, block: Block, n: int) -> list[int]:
    w = {name.removeprefix("markov_head."): tensor for name, tensor in w.items()}
    previous, tokens, state = int(block.anchor_ids[n]), [], torch.zeros(settings["markov_rank"])
    for s in range(block.hidden.shape[1]):
        h, e = block.hidden[n, s], w["markov_w1.weight"][previous]
        code = e
        if settings["markov_head_type"] == "gated":
            code = torch.sigmoid(w["gate_proj.weight"] @ torch.cat([h, e]) + w["gate_proj.bias"]) * e
        if settings["markov_head_type"] == "rnn":
            a, c, o = (w["joint_proj.weight"] @ torch.cat([state, e, h]) + w["joint_proj.bias"]).view(3, -1)
            code = o.tanh()
            state = a.sigmoid() * state + (1 - a.sigmoid()) * c.tanh()
        previous = int((block.logits[n, s] + w["markov_w2.weight"] @ code).argmax())
        tokens.append(previous)
    return tokens


def naive_dcoco(w: dict, settings: dict, block: Block, n: int) -> list[int]:
    def linear(name, x):
        return w[f"{name}.weight"] @ x + w[f"{name}.bias"]

    def norm(x):
        return (x - x.mean()) / (x.var(unbiased=False) + 1e-5).sqrt()

    def node(s, token):
        b, g = norm(linear("token_proj", block.embed(torch.tensor(token)))), norm(linear("hidden_proj", h[s]))
        return linear("fuse", torch.cat([b, g]))

    h = block.hidden[n]
    tokens = [int(block.logits[n, 0].argmax())]
    for s in range(1, block.hidden.shape[1]):
        pair = linear("pair_proj", torch.cat([h[s - 1], h[s]]))
        best, chosen = -math.inf, None
        for token in block.logits[n, s].topk(settings["num_candidates"]).indices.tolist():
            inner = linear("transition", torch.cat([node(s - 1, tokens[-1]), node(s, token), pair]))
            score = float(block.logits[n, s, token] + linear("output", F.silu(inner)))
            if score > best:
                best, chosen = score, token
        tokens.append(chosen)
    return tokens


def naive_selector(w: dict, settings: dict, block: Block, n: int) -> list[int]:
    previous, tokens = int(block.anchor_ids[n]), []
    for s in range(block.hidden.shape[1]):
        gate = w["hidden_projection.weight"] @ block.hidden[n, s]
        pool = block.logits[n, s].topk(settings["num_candidates"]).indices
        scores = block.logits[n, s, pool] + w["successor_codebook"][pool] @ (w["predecessor_codebook"][previous] * gate)
        previous = int(pool[scores.argmax()])
        tokens.append(previous)
    return tokens


def naive_xpress(w: dict, settings: dict, block: Block, n: int) -> list[int]:
    rows = torch.cat([block.anchor_hidden[n, None], block.hidden[n]])
    whole = w["down_g.weight"] @ rows.mean(0)
    previous, tokens, x = int(block.anchor_ids[n]), [], []
    for k, row in enumerate(rows):
        x.append(w["in_proj.weight"] @ torch.cat([w["down_h.weight"] @ row, whole, w["token_embed.weight"][previous]]))
        mixed = x[k] + sum(w["mix_l"][:, k, j] * x[j] for j in range(k + 1))
        inner = F.silu(w["mlp_gate.weight"] @ mixed) * (w["mlp_up.weight"] @ mixed)
        if k > 0:  # the anchor's own row has nothing to predict, and the anchor stands for the token before it
            bias = w["readout.weight"] @ (mixed + w["mlp_down.weight"] @ inner)
            previous = int((block.logits[n, k - 1] + bias).argmax())
            tokens.append(previous)
    return tokens


NAIVE = {
    "domino": naive_domino,
    "dspark": naive_dspark,
    "dcoco": naive_dcoco,
    "selector": naive_selector,
    "xpress": naive_xpress,
}


@pytest.mark.parametrize("slots", [SLOTS, 3, 1])
@pytest.mark.parametrize("name", TINY)
def test_a_draft_equals_a_naive_slot_by_slot_version(name: str, slots: int) -> None:
    head_type, settings = TINY[name]
    model, block = lively(name), random_block(slots)
    got = draft(model, block)
    weights = {name: tensor.detach() for name, tensor in model.head.state_dict().items()}
    want = [NAIVE[head_type](weights, settings, block, n) for n in range(4)]
    assert got.tokens.tolist() == want
    assert got.tokens.dtype == torch.int64 and got.finite.shape == (4, slots) and bool(got.finite.all())
    if slots == SLOTS:
        assert got.tokens.tolist() != block.logits.argmax(-1).tolist(), "the head must have changed something"


def test_known_tokens_give_the_codes_of_the_draft_that_chose_them() -> None:
    for name in ("domino", "domino-2", "vanilla", "gated", "rnn"):
        model, block = lively(name), random_block()
        tokens = draft(model, block).tokens
        previous = torch.cat([block.anchor_ids[:, None], tokens[:, :-1]], dim=1)
        with torch.no_grad():
            codes = model.head.codes(block.hidden, block.embed(previous) if "domino" in name else previous)
            logits = block.logits + model.head.corrections(codes)
        keep = TINY[name][1].get("pure_draft_prefix_len", 0)
        logits[:, :keep] = block.logits[:, :keep]
        assert torch.equal(logits.argmax(-1), tokens), name


# --- what a head must not or must change ------------------------------------------------------------------------------


@pytest.mark.parametrize("head_type", ["dcoco", "selector"])
def test_a_fresh_head_is_the_drafter(head_type: str) -> None:
    torch.manual_seed(0)
    model = LiLiCorrModel(tiny_config(head_type, None)).eval()
    block = random_block()
    got = draft(model, block, return_lattice=True)
    assert torch.equal(got.tokens, block.logits.argmax(-1))
    assert not got.lattice.picks.any()


@pytest.mark.parametrize("name", ["domino", "vanilla", "gated", "rnn", "xpress"])
def test_without_its_last_matrix_a_head_is_the_drafter(name: str) -> None:
    model, block = lively(name), random_block()
    last = {"domino": "embed_proj.2", "xpress": "readout"}.get(name, "markov_head.markov_w2")
    torch.nn.init.zeros_(model.head.get_submodule(last).weight)
    assert torch.equal(draft(model, block).tokens, block.logits.argmax(-1))


@pytest.mark.parametrize("name", TINY)
def test_which_first_slots_a_head_leaves_to_the_drafter(name: str) -> None:
    kept = {"dcoco": 1, "domino": 1, "domino-2": 2}.get(name, 0)
    changed = torch.zeros(SLOTS, dtype=torch.bool)
    for seed in range(8):
        block = random_block(seed=seed, blocks=8)
        changed |= (draft(lively(name, seed), block).tokens != block.logits.argmax(-1)).any(0)
    assert not changed[:kept].any() and changed[kept:].all()


@pytest.mark.parametrize("name", TINY)
def test_ties_go_to_the_lower_id(name: str) -> None:
    model, block = lively(name), random_block()
    for parameter in model.head.parameters():
        torch.nn.init.zeros_(parameter)
    block.logits = torch.zeros_like(block.logits)
    block.logits[..., 7:] = 1.0
    assert draft(model, block).tokens.unique().tolist() == [7]


def test_low_precision_ties_go_to_the_lower_id_too() -> None:
    for name in TINY:
        model, block = lively(name).to(torch.bfloat16), random_block()
        for parameter in model.head.parameters():
            torch.nn.init.zeros_(parameter)
        block.logits, block.hidden = (block.logits / 8).to(torch.bfloat16), block.hidden.to(torch.bfloat16)
        first = (block.logits == block.logits.amax(-1, keepdim=True)).long().argmax(-1)
        assert torch.equal(draft(model, block).tokens, first), name


@pytest.mark.parametrize("name", TINY)
def test_unusable_logits_are_reported_and_masked_tokens_are_not(name: str) -> None:
    model, block = lively(name), random_block(blocks=3)
    block.logits[0, 2, 5] = math.nan
    block.logits[1, 3, 5] = math.inf
    block.logits[2, :, :8] = -math.inf
    got = draft(model, block)
    assert not got.finite[0, 2] and not got.finite[1, 3] and got.finite[2].all()
    assert got.finite[0, :2].all() and got.finite[1, :3].all()
    assert (got.tokens >= 0).all() and (got.tokens < VOCAB).all() and (got.tokens[2] >= 8).all()


@pytest.mark.parametrize("name", TINY)
def test_a_lattice_lists_the_drafters_best_and_what_was_committed(name: str) -> None:
    model, block = lively(name), random_block()
    got = draft(model, block, return_lattice=True)
    lattice = got.lattice
    count = min(model.head.num_candidates, VOCAB)
    assert lattice.candidates.shape == (4, SLOTS, count)
    assert torch.equal(lattice.candidates.gather(-1, lattice.picks[..., None])[..., 0], got.tokens)
    best = block.logits.topk(count).indices
    assert torch.equal(lattice.candidates[..., :-1], best[..., :-1])
    exact = block.logits.log_softmax(-1).gather(-1, lattice.candidates)
    torch.testing.assert_close(lattice.log_probs, exact)
    assert (lattice.log_probs.diff(dim=-1) <= 0).all()
    if model.config.head_type in ("dcoco", "selector"):
        assert lattice.first_scores.shape == (4, count) and lattice.pair_scores.shape == (4, SLOTS - 1, count, count)
        assert torch.equal(lattice.candidates, best)


def test_a_confidence_reads_the_state_and_the_token_before() -> None:
    block = random_block()
    previous = torch.randint(0, VOCAB, (4, SLOTS))
    for with_markov in (True, False):
        torch.manual_seed(0)
        head = LiLiCorrModel(tiny_config("dspark", TINY["rnn"][1] | {"confidence_head_with_markov": with_markov})).head
        w = head.state_dict()
        for n, s in ((0, 0), (3, 4)):
            features = block.hidden[n, s]
            if with_markov:
                features = torch.cat([features, w["markov_head.markov_w1.weight"][previous[n, s]]])
            want = (w["confidence_head.proj.weight"] @ features + w["confidence_head.proj.bias"])[0]
            torch.testing.assert_close(head.confidences(block.hidden, previous)[n, s], want)
    silent = LiLiCorrModel(tiny_config("dspark", TINY["rnn"][1] | {"enable_confidence_head": False})).head
    with pytest.raises(ValueError, match="has no confidence; build it with enable_confidence_head"):
        silent.confidences(block.hidden, previous)


# --- checkpoints ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TINY)
def test_a_saved_head_comes_back_bit_for_bit_and_drafts_the_same(name: str, tmp_path) -> None:
    model, block = lively(name), random_block()
    model.save_pretrained(tmp_path)
    loaded = LiLiCorrModel.from_pretrained(tmp_path)
    for key, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], tensor), key
    assert torch.equal(draft(loaded, block).tokens, draft(model, block).tokens)
    assert (tmp_path / f"head_{model.config.head_type}.py").is_file()


@pytest.mark.parametrize("name", TINY)
def test_a_backbone_checkpoint_gets_a_fresh_head(name: str, tmp_path) -> None:
    torch.manual_seed(0)
    LiLiCorrModel(tiny_config("none", None)).save_dflash(tmp_path)
    head_type, settings = TINY[name]
    head = LiLiCorrModel.from_dflash(tmp_path, head_type, head_config=settings).head
    zeros = {"output.weight", "output.bias", "successor_codebook", "mix_l"}
    for key, parameter in head.named_parameters():
        assert parameter.isfinite().all() and parameter.abs().max() < 5, key
        assert bool(parameter.any()) != (key in zeros or key.endswith("bias")), key
    if head_type == "domino":
        bound = 18**-0.5
        assert bound * 0.9 < head.prefix_gru.weight_hh_l0.abs().max() <= bound


# --- draws ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["vanilla", "gated", "rnn"])
def test_dspark_draws_each_slot_after_the_token_drawn_before_it_and_tells_what_from(name: str) -> None:
    model = lively(name)
    block = random_block()
    seen = []

    def warp(drafted, logits):
        seen.append(drafted)
        return logits / 0.7

    block.warp = warp
    torch.manual_seed(3)
    drawn = draft(model, block)
    assert [each.shape[1] for each in seen] == list(range(SLOTS))
    assert all(torch.equal(each, drawn.tokens[:, : each.shape[1]]) for each in seen)
    previous = torch.cat([block.anchor_ids[:, None], drawn.tokens[:, :-1]], dim=1)
    with torch.no_grad():
        head = model.head
        corrected = block.logits + head.corrections(head.codes(block.hidden, previous))
    torch.testing.assert_close(drawn.logits, corrected / 0.7)
    torch.manual_seed(4)
    assert not torch.equal(draft(model, block).tokens, drawn.tokens)


def test_a_draw_survives_logits_that_are_not_finite() -> None:
    model, block = lively("rnn"), random_block()
    block.logits[1, 2] = torch.nan
    block.warp = lambda drafted, logits: logits
    drawn = draft(model, block)
    assert not drawn.finite[1, 2] and drawn.finite[0].all() and (drawn.tokens < VOCAB).all()
