"""Each rival's loss against its paper's equations, block by block with dense logits, and on an overfit example."""

import json
import math

import pytest
import torch
from lilicorr import LiLiCorrConfig, LiLiCorrModel
from lilicorr.kernels.reference import topk_logsumexp
from lilicorr.modeling_lilicorr.head_settings import HEAD_TYPES, default_head_config
from lilicorr.training.anchors import sample_blocks
from lilicorr.training.losses.joint import JointObjective
from lilicorr.training.losses.registry import DENOMINATORS, HEAD_LOSSES, build_head_loss
from lilicorr.training.losses.terms import Objective
from lilicorr.training.target import target_pass
from lilicorr.training.train import train
from lilicorr.training.vocabulary import corrected_terms
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

BLOCK, BETA, PROGRESS = 6, 3.0, 0.25
ARMS = {
    "domino": ("domino", {}),
    "vanilla": ("dspark", {}),
    "gated": ("dspark", {"markov_head_type": "gated", "confidence_head_with_markov": False}),
    "rnn": ("dspark", {"markov_head_type": "rnn"}),
    "silent": ("dspark", {"enable_confidence_head": False}),
    "dcoco": ("dcoco", {"num_candidates": 40}),
    "selector": ("selector", {"num_candidates": 40}),
    "xpress": ("xpress", {}),
}


@pytest.fixture
def target(target_folder):
    return AutoModelForCausalLM.from_pretrained(target_folder).eval().requires_grad_(False)


@pytest.fixture
def batch():
    """Token ids and blocks of two sequences; the first has a gap in its supervision."""
    generator = torch.Generator().manual_seed(1)
    input_ids = torch.randint(4, 64, (2, 20), generator=generator)
    loss_mask = torch.zeros(2, 20, dtype=torch.bool)
    loss_mask[0, 5:] = True
    loss_mask[0, 12] = False
    loss_mask[1, 9:16] = True
    return input_ids, sample_blocks(input_ids, loss_mask, BLOCK, 6, generator)


def build(target, arm, spread=0.3):
    torch.manual_seed(1)
    head_type, changes = ARMS[arm]
    head = default_head_config(head_type, 32) | changes
    config = LiLiCorrConfig.for_target(
        target.config, mask_token_id=3, block_size=BLOCK, head_type=head_type, head_config=head
    )
    drafter = LiLiCorrModel(config).train()
    with torch.no_grad():
        for parameter in drafter.head.parameters():
            parameter.add_(torch.randn_like(parameter) * spread)
    return drafter


def run(joint, input_ids, blocks):
    (target,) = joint._target
    return joint(input_ids, *target_pass(target, input_ids, joint.drafter.config.target_layer_ids), blocks)


def hand_made(target, drafter, input_ids, blocks):
    """The loss of a batch with the default weights, slot after slot from the equations."""
    outputs = target(input_ids, output_hidden_states=True)
    target_hidden = torch.cat([outputs.hidden_states[i + 1] for i in drafter.config.target_layer_ids], dim=-1)
    embed, lm_head, head = target.get_input_embeddings(), target.get_output_embeddings(), drafter.head
    add = dict.fromkeys(("base", "final", "weight", "own", "own_weight"), 0.0)
    for row, n in blocks.keep.nonzero().tolist():
        p = int(blocks.anchors[row, n])
        context = drafter.project_context(target_hidden[row : row + 1, :p])
        noise = embed(drafter.block_ids(input_ids[row, p : p + 1]))
        positions = torch.arange(p, p + BLOCK)[None]
        states = drafter.decode_block(noise, context, positions, torch.arange(p)[None])
        logits = lm_head(states[0, 1:])
        labels, supervised = blocks.labels[row, n], blocks.supervised[row, n]
        before = torch.cat([input_ids[row, p : p + 1], labels[:-1]])
        whole = 1.0
        if drafter.config.head_type == "xpress":
            terms = xpress_terms(head, states[0], logits, before)
        else:
            terms = {
                "domino": domino_terms, "dspark": dspark_terms, "dcoco": dcoco_terms, "selector": selector_terms
            }[drafter.config.head_type](head, states[:, 1:], logits, before, embed)  # fmt: skip
        for s in range(BLOCK - 1):
            whole *= float(supervised[s])
            if not supervised[s]:
                continue
            q = outputs.logits[row, p + s].softmax(-1)
            weight = math.exp(-s / BETA)
            add["base"] += weight * -logits[s].log_softmax(-1)[labels[s]]
            add["weight"] += weight
            own = terms(s, labels, supervised, outputs.logits[row, p : p + BLOCK - 1], q, weight * whole, weight)
            for name, value in own.items():
                add[name] += value
    return add


def domino_terms(head, hidden, logits, before, embed):
    gru = torch.nn.GRU(32, head.prefix_gru.hidden_size, bias=False, batch_first=True)
    states = torch.func.functional_call(gru, dict(head.prefix_gru.named_parameters()), (embed(before)[None],))[0][0]

    def terms(s, labels, supervised, target_logits, q, reached, weight):
        corrected = logits[s]
        if s >= 1:
            corrected = corrected + head.embed_proj(torch.cat([hidden[0, s], states[s]]))
        return {"final": weight * -corrected.log_softmax(-1)[labels[s]]}

    return terms


def dspark_terms(head, hidden, logits, before, embed):
    codes = head.codes(hidden, before[None])[0]
    confidence = None if head.confidence_head is None else head.confidences(hidden, before[None])[0].sigmoid()

    def terms(s, labels, supervised, target_logits, q, reached, weight):
        log_p = (logits[s] + head.markov_head.markov_w2.weight @ codes[s]).log_softmax(-1)
        distance = (log_p.exp() - q).abs().sum()
        loss = 0.1 * -log_p[labels[s]] + 0.9 * distance
        if confidence is not None:
            wanted = 1 - distance.detach() / 2
            loss = loss - wanted * confidence[s].log() - (1 - wanted) * (1 - confidence[s]).log()
        return {"own": reached * loss, "own_weight": reached}

    return terms


def dcoco_terms(head, hidden, logits, before, embed):
    values, candidates, normaliser = topk_logsumexp(logits, head.num_candidates)
    _, pair = head.scores(embed(candidates)[None], (values - normaliser[:, None])[None], hidden)

    def terms(s, labels, supervised, target_logits, q, reached, weight):
        best = target_logits.argmax(-1)
        if s == 0 or not supervised[s - 1] or not all(best[j] in candidates[j] for j in (s - 1, s)):
            return {}
        a, b = ((candidates[j] == best[j]).nonzero().item() for j in (s - 1, s))
        decay = math.exp(-(s - 1) / 4)
        return {"own": -decay * (pair[0, s - 1, a, b] - pair[0, s - 1].logsumexp((0, 1))), "own_weight": decay}

    return terms


def selector_terms(head, hidden, logits, before, embed):
    candidates = topk_logsumexp(logits, head.num_candidates)[1]

    def terms(s, labels, supervised, target_logits, q, reached, weight):
        if labels[s] not in candidates[s]:
            return {}
        gate = head.predecessor_codebook[before[s]] * head.hidden_projection(hidden[0, s])
        scores = logits[s, candidates[s]] + head.successor_codebook[candidates[s]] @ gate
        return {"own": -weight * scores.log_softmax(-1)[candidates[s] == labels[s]].sum(), "own_weight": weight}

    return terms


def xpress_terms(head, states, logits, before):
    def refine(previous):
        tokens = torch.cat([previous[:1], previous])
        whole = head.down_g(states.mean(0)).expand(BLOCK, -1)
        x = head.in_proj(torch.cat([head.down_h(states), whole, head.token_embed(tokens)], dim=-1))
        x = torch.stack([x[k] + sum(head.mix_l[:, k, j] * x[j] for j in range(k + 1)) for k in range(BLOCK)])
        x = x + head.mlp_down(F.silu(head.mlp_gate(x)) * head.mlp_up(x))
        return logits + head.readout(x[1:])

    refined, rounds, tokens = refine(before), [], logits.argmax(-1)
    for _ in range(3):
        rounds.append(refine(torch.cat([before[:1], tokens[:-1]])))
        tokens = rounds[-1].argmax(-1)

    def terms(s, labels, supervised, target_logits, q, reached, weight):
        def compound(scores):
            log_p = scores[s].log_softmax(-1)
            return 0.1 * -log_p[labels[s]] + 0.9 * (log_p.exp() - q).abs().sum() / 2

        loss = compound(refined) + 0.3 * sum(map(compound, rounds)) / 3 + 0.6 * compound(logits)
        return {"own": reached * loss, "own_weight": reached}

    return terms


def combine(head_type, add):
    base = add["base"] / add["weight"]
    if head_type == "domino":
        return 0.25 * add["final"] / add["weight"] + 0.75 * base
    if head_type in ("dspark", "xpress"):
        return add["own"] / add["own_weight"]
    return base + add["own"] / add["weight" if head_type == "selector" else "own_weight"]


def gradients(drafter, loss):
    drafter.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in drafter.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("arm", ARMS)
def test_a_loss_and_its_gradients_equal_the_equations_block_by_block(target, batch, arm):
    drafter = build(target, arm)
    joint = JointObjective(drafter, target, Objective(beta=BETA), at_once=4)
    sums = run(joint, *batch)
    loss = joint.loss(sums, sums, PROGRESS)
    add = hand_made(target, drafter, *batch)
    by_hand = combine(ARMS[arm][0], add)
    if ARMS[arm][0] != "domino":
        assert float(add["own_weight"]) > 3
    torch.testing.assert_close(loss, by_hand, rtol=1e-4, atol=1e-5)
    ours, theirs = gradients(drafter, loss), gradients(drafter, by_hand)
    assert ours.keys() == theirs.keys() == dict(drafter.named_parameters()).keys()
    whole = torch.stack([gradient.norm() for gradient in theirs.values()]).norm()
    for name in ours:
        error = (ours[name] - theirs[name]).norm() / theirs[name].norm().clamp(min=1e-3 * whole)
        assert error < 1e-3, f"{name}: relative error {error}"
    assert all(p.grad is None for p in target.parameters())


@pytest.mark.parametrize("arm", ARMS)
def test_the_walk_metric_is_the_draft_on_the_same_block(target, batch, arm):
    input_ids, blocks = batch
    drafter = build(target, arm, spread=0.02).eval()
    target_hidden, last = target_pass(target, input_ids, drafter.config.target_layer_ids)
    joint = JointObjective(drafter, target, Objective(beta=BETA))
    drafts = {}
    for row, n in blocks.keep.nonzero().tolist():
        p = int(blocks.anchors[row, n])
        drafts[row, n] = drafter.draft(
            input_ids[row, p : p + 1], target_hidden[row : row + 1, :p], torch.arange(p)[None], drafter.new_cache(),
            target.get_input_embeddings(), target.get_output_embeddings(),
        ).tokens[0]  # fmt: skip
        # Labels that agree with the draft up to a slot of its own, which is the only way to get long runs here.
        run_length = (row + n) % BLOCK
        input_ids[row, p + 1 : p + 1 + run_length] = drafts[row, n][: len(input_ids[row, p + 1 : p + 1 + run_length])]
        one = sample_blocks(input_ids[row : row + 1], one_anchor(p), BLOCK, 1, torch.Generator())
        sums = joint(input_ids[row : row + 1], target_hidden[row : row + 1], last[row : row + 1], one)
        hits = (drafts[row, n] == one.labels[0, 0]) & one.supervised[0, 0]
        assert sums["walk_accepted"].tolist() == hits.long().cumprod(0).tolist()


def one_anchor(p):
    """A loss mask `[1, 20]` under which the block at `p` is the first and only one of its sequence."""
    mask = torch.zeros(1, 20, dtype=torch.bool)
    mask[0, p : p + 2] = True
    return mask


@pytest.mark.parametrize("arm", ["domino", "vanilla", "gated", "rnn", "dcoco", "selector", "xpress"])
def test_a_loss_falls_on_an_overfit_example_and_the_draft_gets_longer(target, batch, arm):
    drafter = build(target, arm, spread=0.0)
    joint = JointObjective(drafter, target, Objective(beta=0.0))
    optimizer = torch.optim.Adam(drafter.parameters(), lr=1e-2)
    curve = []
    for _ in range(40):
        sums = run(joint, *batch)
        loss = joint.loss(sums, sums, 1.0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        own = {name: float(sums[name].detach() / sums[by]) for name, by in joint.head_loss.over.items()}
        curve.append((float(loss.detach()), own, float(sums["walk_accepted"].sum())))
    (first, own_first, short), (last, own_last, long) = curve[0], curve[-1]
    assert last < 0.75 * first and long > short
    for name in own_first:
        floor = 0.693 if name == "confidence" else 0.8 * own_first[name]  # a confidence starts near one bit
        assert own_last[name] < floor, f"{name}: {own_first[name]} to {own_last[name]}"


def test_lambda_falls_linearly_from_one_end_to_the_other():
    loss = build_head_loss("domino", Objective())
    assert [loss.base_share(progress) for progress in (0.0, 0.25, 1.0)] == [1.0, 0.75, 0.0]
    half = build_head_loss("domino", Objective(head={"lambda_decay": 0.5, "lambda_start": 0.8}))
    assert [half.base_share(progress) for progress in (0.0, 0.25, 0.5, 1.0)] == pytest.approx([0.8, 0.4, 0.0, 0.0])


def test_lambda_of_one_trains_the_drafter_alone(target, batch):
    drafter = build(target, "domino")
    joint = JointObjective(drafter, target, Objective(beta=BETA))
    sums = run(joint, *batch)
    torch.testing.assert_close(joint.loss(sums, sums, 0.0), sums["dflash"] / sums["weight"])
    grads = gradients(drafter, joint.loss(sums, sums, 0.0))
    assert grads["domino.embed_proj.2.weight"].count_nonzero() == 0, "there, so that nothing waits for it, but zero"


def test_the_default_weights_are_the_papers_and_can_be_replaced():
    weights = {name: loss.settings for name, loss in HEAD_LOSSES.items()}
    assert weights == {
        "none": {},
        "lilicorr": {},
        "dcoco": {"rho": 4.0, "correction": 1.0},
        "domino": {"lambda_start": 1.0, "lambda_decay": 1.0},
        "dspark": {"cross_entropy": 0.1, "distance": 0.9, "confidence": 1.0},
        "selector": {"alpha": 1.0},
        "xpress": {
            "cross_entropy": 0.1,
            "total_variation": 0.9,
            "consistency": 0.3,
            "consistency_passes": 3,
            "base": 0.6,
        },
    }
    assert set(HEAD_LOSSES) == set(HEAD_TYPES)
    assert len(DENOMINATORS) == 1 + sum(len(loss.over) for loss in HEAD_LOSSES.values()), "a name means one thing"
    changed = build_head_loss("dspark", Objective(head={"distance": 0.5}))
    assert changed.weigh == {"cross_entropy": 0.1, "distance": 0.5, "confidence": 1.0}
    with pytest.raises(ValueError, match=r"objective\.head sets 'rho', but this head's loss takes alpha"):
        build_head_loss("selector", Objective(head={"rho": 1.0}))


@pytest.mark.parametrize("rounds", [0, 1, 2])
def test_the_rounds_of_xpress_can_be_fewer(target, batch, rounds):
    drafter = build(target, "xpress")
    whole = JointObjective(drafter, target, Objective(beta=BETA, head={"consistency_passes": rounds}))
    sums = run(whole, *batch)
    assert ("consistent" in sums) == (rounds > 0)
    parts = {"refined": 1.0, "unrefined": 0.6} | ({"consistent": 0.3} if rounds else {})
    by_hand = sum(share * sums[name] for name, share in parts.items()) / sums["reached"]
    torch.testing.assert_close(whole.loss(sums, sums, PROGRESS), by_hand)
    kinds = {name: float(sums[name].detach()) for name in parts}
    assert len(set(kinds.values())) == len(parts), kinds


@pytest.mark.parametrize("rounds", [-1, 1.5])
def test_a_number_of_rounds_that_cannot_be_is_one_sentence(rounds):
    with pytest.raises(ValueError, match=f"consistency_passes is {rounds}, expected a whole number, 0 or more"):
        build_head_loss("xpress", Objective(head={"consistency_passes": rounds}))


def test_corrected_terms_do_not_depend_on_the_chunk():
    torch.manual_seed(0)
    weight, bias, matrix = torch.randn(30, 8), torch.randn(30), torch.nn.Linear(5, 30, bias=False)
    states, codes = torch.randn(11, 8, requires_grad=True), torch.randn(11, 5, requires_grad=True)
    labels, teacher = torch.randint(0, 30, (11,)), torch.randn(11, 8)
    logits = F.linear(states, weight, bias) + matrix(codes)
    distance = (logits.softmax(-1) - F.linear(teacher, weight, bias).softmax(-1)).abs().sum(-1)
    want = (F.cross_entropy(logits, labels, reduction="none"), distance)
    wanted = torch.autograd.grad(want[0].sum() + want[1].sum(), (states, codes, matrix.weight))
    for chunk in (1, 4, 100):
        *got, best = corrected_terms(states, codes, matrix, weight, bias, labels, teacher, chunk)
        torch.testing.assert_close(tuple(got), want)
        assert torch.equal(best, logits.argmax(-1))
        grads = torch.autograd.grad(got[0].sum() + got[1].sum(), (states, codes, matrix.weight))
        torch.testing.assert_close(grads, wanted)
    bare, _, best = corrected_terms(states, None, matrix, weight, bias, labels, chunk=4)
    torch.testing.assert_close(bare, F.cross_entropy(logits - matrix(codes), labels, reduction="none"))
    assert torch.equal(best, (logits - matrix(codes)).argmax(-1))
    none = corrected_terms(states[:0], codes[:0], matrix, weight, bias, labels[:0])
    assert [part.shape for part in none] == [(0,)] * 3


@pytest.mark.parametrize("arm", ["domino", "vanilla", "gated", "rnn", "dcoco", "selector", "xpress"])
def test_mixed_precision_gives_nearly_the_same_loss(target, batch, arm):
    drafter = build(target, arm, spread=0.05)
    joint = JointObjective(drafter, target, Objective(beta=BETA))
    exact = joint.loss(*2 * [run(joint, *batch)], PROGRESS)
    with torch.autocast("cpu", torch.bfloat16):
        sums = run(joint, *batch)
    loss = joint.loss(sums, sums, PROGRESS)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, exact, rtol=0.05, atol=0.0)
    assert all(gradient.isfinite().all() for gradient in gradients(drafter, loss).values())


@pytest.mark.parametrize("head_type", ["domino", "dspark", "dcoco", "selector", "xpress"])
def test_a_run_trains_the_head_and_logs_its_loss(tmp_path, make_settings, head_type):
    settings = make_settings(tmp_path, head_type=head_type, steps=2, log_every=1, micro_batch_size=2)
    drafter = LiLiCorrModel.from_pretrained(train(settings))
    assert drafter.config.head_type == head_type
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    for name in HEAD_LOSSES[head_type].over:
        assert 0 < lines[0][name] < 10 and not set(lines[0]) & set(DENOMINATORS.values()), lines[0]
    assert lines[-1]["walk_length"] >= 1
