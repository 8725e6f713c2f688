import pytest
import torch
from lilicorr import LiLiCorrConfig, LiLiCorrModel
from lilicorr.kernels.reference import lattice_scores, topk_logsumexp
from lilicorr.training.anchors import sample_blocks
from lilicorr.training.block_states import block_states
from lilicorr.training.losses import Objective
from lilicorr.training.objective import JointObjective
from lilicorr.training.target import target_pass
from transformers import AutoConfig, AutoModelForCausalLM

BLOCK = 5


@pytest.fixture
def setup(target_folder):
    torch.manual_seed(1)
    target = AutoModelForCausalLM.from_pretrained(target_folder).eval().requires_grad_(False)
    head = {
        "num_candidates": 60, "hidden_size": 24, "num_layers": 1, "num_heads": 2, "intermediate_size": 48,
        "factor_dim": 16, "logit_scale": 8.0, "vector_eps": 1e-6,
    }  # fmt: skip
    config = LiLiCorrConfig.for_target(target.config, mask_token_id=3, block_size=BLOCK, head_config=head)
    drafter = LiLiCorrModel(config).train()
    input_ids = torch.randint(4, 64, (2, 20))
    loss_mask = torch.zeros(2, 20, dtype=torch.bool)
    loss_mask[0, 6:] = True
    loss_mask[1, 9:16] = True
    blocks = sample_blocks(input_ids, loss_mask, BLOCK, 6, torch.Generator().manual_seed(0))
    return target, drafter, input_ids, blocks


def run(joint, input_ids, blocks):
    (target,) = joint._target
    return joint(input_ids, *target_pass(target, input_ids, joint.drafter.config.target_layer_ids), blocks)


def naive_sums(target, drafter, input_ids, blocks, objective):
    """The same sums block by block with dense logits, straight from the paper's equations."""
    outputs = target(input_ids, output_hidden_states=True)
    taps = torch.cat([outputs.hidden_states[i + 1] for i in drafter.config.target_layer_ids], dim=-1)
    embed, head = target.get_input_embeddings(), target.get_output_embeddings()
    sums = dict.fromkeys(("dflash", "weight", "cross_entropy", "distractor", "margin", "covered"), 0.0)
    for row in range(2):
        for n in range(blocks.anchors.shape[1]):
            if not blocks.keep[row, n]:
                continue
            p = int(blocks.anchors[row, n])
            context = drafter.project_context(taps[row : row + 1, :p])
            noise = embed(drafter.block_ids(input_ids[row, p : p + 1]))
            positions = torch.arange(p, p + BLOCK)[None]
            hidden = drafter.decode_block(noise, context, positions, torch.arange(p)[None])[0, 1:]
            logits = head(hidden)
            values, candidates, normaliser = topk_logsumexp(logits, 60)
            factors = drafter.head.factors(
                embed(candidates)[None], (values - normaliser[:, None])[None], hidden[None], context[:, -1]
            )
            first, pair = lattice_scores(*factors, 8.0)
            covered, previous = True, None
            for s in range(1, BLOCK):
                if not blocks.supervised[row, n, s - 1]:
                    break  # supervision in these sequences never resumes behind a gap
                label = input_ids[row, p + s]
                weight = torch.exp(torch.tensor(-(s - 1) / objective.beta))
                sums["dflash"] += -weight * logits[s - 1].log_softmax(-1)[label]
                sums["weight"] += weight
                hit = (candidates[s - 1] == label).nonzero()
                covered = covered and len(hit) > 0
                if not covered:
                    continue
                gold = int(hit[0])
                z = first[0] if s == 1 else pair[0, s - 2, previous]
                previous = gold
                log_q = outputs.logits[row, p + s - 1].log_softmax(-1)[candidates[s - 1]]
                sums["cross_entropy"] += -z.log_softmax(-1)[gold]
                sums["distractor"] += (z.softmax(-1) * torch.relu(log_q[gold] - log_q)).sum()
                rivals = torch.cat([z[:gold], z[gold + 1 :]])
                sums["margin"] += torch.relu(objective.rho - (z[gold] - rivals.max()))
                sums["covered"] += 1
    return sums


def gradients(drafter, loss):
    drafter.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in drafter.named_parameters() if p.grad is not None}


def test_chunked_objective_and_gradients_equal_the_equations_block_by_block(setup):
    target, drafter, input_ids, blocks = setup
    objective = Objective(beta=3.0, gamma=0.5, penalty=0.7, mu=0.3, rho=1.0)
    joint = JointObjective(drafter, target, objective)
    sums = run(joint, input_ids, blocks)
    expected = naive_sums(target, drafter, input_ids, blocks, objective)
    assert expected["covered"] > 8, "the fixture must exercise pairs, not only first slots"
    for name, value in expected.items():
        torch.testing.assert_close(sums[name], torch.as_tensor(value), rtol=1e-4, atol=1e-4, check_dtype=False)
    loss = joint.loss(sums, sums)
    by_hand = (
        expected["dflash"] / expected["weight"]
        + 0.5
        * (0.7 * expected["cross_entropy"] + 0.7 * expected["distractor"] + 0.3 * expected["margin"])
        / expected["covered"]
    )
    torch.testing.assert_close(loss, by_hand, rtol=1e-4, atol=1e-5)
    ours, theirs = gradients(drafter, loss), gradients(drafter, by_hand)
    assert ours.keys() == theirs.keys()
    whole = torch.stack([gradient.norm() for gradient in theirs.values()]).norm()
    for name in ours:  # a gradient that is almost nothing is compared with a thousandth of the whole
        error = (ours[name] - theirs[name]).norm() / theirs[name].norm().clamp(min=1e-3 * whole)
        assert error < 1e-4, f"{name}: relative error {error}"


def test_reranker_loss_alone_reaches_the_backbone_but_not_the_target(setup):
    target, drafter, input_ids, blocks = setup
    sums = run(JointObjective(drafter, target, Objective()), input_ids, blocks)
    grads = gradients(drafter, sums["cross_entropy"])
    assert grads["fc.weight"].any() and grads["layers.0.self_attn.q_proj.weight"].any()
    assert all(p.grad is None for p in target.parameters())


def test_the_walk_metric_is_the_decode_loop_on_the_same_block(setup):
    target, drafter, input_ids, blocks = setup
    drafter.eval()
    sums = run(JointObjective(drafter, target, Objective()), input_ids, blocks)
    outputs = target(input_ids, output_hidden_states=True)
    taps = torch.cat([outputs.hidden_states[i + 1] for i in drafter.config.target_layer_ids], dim=-1)
    total = 0
    for row in range(2):
        for n in range(blocks.anchors.shape[1]):
            if blocks.keep[row, n]:
                p = int(blocks.anchors[row, n])
                draft = drafter.draft(
                    input_ids[row, p : p + 1], taps[row : row + 1, :p], torch.arange(p)[None], drafter.new_cache(),
                    target.get_input_embeddings(), target.get_output_embeddings(),
                )  # fmt: skip
                hits = (draft.tokens[0] == blocks.labels[row, n]) & blocks.supervised[row, n]
                total += int(hits.long().cumprod(0).sum())
    assert int(sums["walk_accepted"].sum()) == total


def test_metrics_by_slot_are_prefixes_and_coverage_is_not(setup):
    target, drafter, input_ids, blocks = setup
    sums = run(JointObjective(drafter, target, Objective()), input_ids, blocks)
    for name in ("argmax_accepted", "walk_accepted", "oracle_accepted"):
        assert sums[name].shape == (BLOCK - 1,) and (sums[name].diff() <= 0).all()
        assert (sums[name] <= sums["oracle_accepted"]).all()
    assert (sums["in_candidates"] >= sums["oracle_accepted"]).all()
    assert (sums["in_candidates"] <= sums["supervised"]).all()
    assert sums["supervised"].tolist() == blocks.supervised.sum(dim=(0, 1)).tolist()


def test_d_pace_weighs_slots_by_what_the_drafter_promises(setup):
    target, drafter, input_ids, blocks = setup
    paced = Objective(slot_weighting="d-pace", alpha=0.4, gamma=0.0)
    sums = run(JointObjective(drafter, target, paced), input_ids, blocks)
    taps, _ = target_pass(target, input_ids, drafter.config.target_layer_ids)
    _, states = block_states(drafter, target.get_input_embeddings(), input_ids, taps, blocks.anchors, together=3)
    log_probs = target.get_output_embeddings()(states[:, :, 1:]).log_softmax(-1).view(*blocks.labels.shape, -1)
    loss, weight = torch.zeros(()), 0.0
    for row, n in blocks.keep.nonzero().tolist():
        valid = [j for j in range(BLOCK - 1) if blocks.supervised[row, n, j]]
        losses = [-log_probs[row, n, j, blocks.labels[row, n, j]] for j in valid]
        confidence, reached = 1.0, []
        for one in losses:
            confidence *= 0.6 * float(torch.exp(-one.detach())) + 0.4
            reached.append(confidence)
        for j, one in enumerate(losses):
            loss = loss + sum(reached[j:]) * one
            weight += sum(reached[j:])
    torch.testing.assert_close(sums["dflash"], loss, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(float(sums["weight"]), weight, rtol=1e-4, atol=1e-4)
    ours = gradients(drafter, sums["dflash"] / sums["weight"])
    theirs = gradients(drafter, loss / weight)
    torch.testing.assert_close(ours["fc.weight"], theirs["fc.weight"], rtol=1e-3, atol=1e-5)


def test_no_head_trains_on_the_drafter_loss_only(setup):
    target, _, input_ids, blocks = setup
    config = LiLiCorrConfig.for_target(target.config, mask_token_id=3, block_size=BLOCK, head_type="none")
    joint = JointObjective(LiLiCorrModel(config), target, Objective())
    sums = run(joint, input_ids, blocks)
    assert "cross_entropy" not in sums
    torch.testing.assert_close(joint.loss(sums, sums), sums["dflash"] / sums["weight"])


def test_sampled_slots_give_the_same_loss_in_expectation_and_the_same_reranker_terms(setup):
    target, drafter, input_ids, blocks = setup
    full = run(JointObjective(drafter, target, Objective(beta=2.0)), input_ids, blocks)
    sampling = JointObjective(drafter, target, Objective(beta=2.0, sample_slots=True))
    mean = {"dflash": 0.0, "weight": 0.0}
    draws = 400
    for i in range(draws):
        # Evenly spread draws make the mean over them exact up to their spacing.
        blocks.draws = torch.full_like(blocks.draws, (i + 0.5) / draws)
        with torch.no_grad():
            sums = run(sampling, input_ids, blocks)
        for name in mean:
            mean[name] += float(sums[name]) / draws
        torch.testing.assert_close(sums["cross_entropy"], full["cross_entropy"])
    assert mean["dflash"] == pytest.approx(float(full["dflash"]), rel=0.01)
    assert mean["weight"] == pytest.approx(float(full["weight"]), rel=0.01)


@pytest.mark.parametrize("taps", [0, 2])
@pytest.mark.parametrize("together", [1, 4, 5])
def test_blocks_that_attend_as_one_have_the_states_of_blocks_alone(setup, together, taps):
    target, drafter, input_ids, blocks = setup
    if taps:
        config = LiLiCorrConfig(**drafter.config.to_dict() | {"conv_kernel_size": taps, "conv_group_size": 8})
        drafter = LiLiCorrModel(config).train()
        for layer in drafter.layers:
            layer.attention_conv.base_kernel.data.normal_()
            layer.mlp_conv.kernel_projection.weight.data.normal_()
    assert blocks.anchors.shape[1] == 6
    expected = run(JointObjective(drafter, target, Objective()), input_ids, blocks)
    sums = run(JointObjective(drafter, target, Objective(), together), input_ids, blocks)
    torch.testing.assert_close(sums, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("at_once", [2, 4, 5])
def test_blocks_worked_through_in_parts_give_the_same_loss_and_gradients(setup, at_once):
    target, drafter, input_ids, blocks = setup
    whole = JointObjective(drafter, target, Objective(mu=0.5))
    parts = JointObjective(drafter, target, Objective(mu=0.5), at_once=at_once)
    expected, sums = run(whole, input_ids, blocks), run(parts, input_ids, blocks)
    torch.testing.assert_close(sums, expected, rtol=1e-4, atol=1e-4)
    theirs = gradients(drafter, whole.loss(expected, expected))
    ours = gradients(drafter, parts.loss(sums, sums))
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)


def test_parts_keep_activations_of_one_part_only(setup):
    target, drafter, input_ids, blocks = setup

    def kept(at_once):
        """Bytes that autograd holds when the forward pass is over."""
        storages = {}

        def pack(tensor):
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            run(JointObjective(drafter, target, Objective(), at_once=at_once), input_ids, blocks)
        return sum(storages.values())

    assert kept(1) < 0.2 * kept(0)


@pytest.mark.parametrize("tied", [True, False])
def test_the_lm_head_is_the_one_of_the_loaded_target(target_folder, tmp_path, tied):
    torch.manual_seed(2)
    config = AutoConfig.from_pretrained(target_folder, tie_word_embeddings=tied)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    target = AutoModelForCausalLM.from_pretrained(tmp_path).eval().requires_grad_(False)
    assert (target.get_output_embeddings().weight is target.get_input_embeddings().weight) == tied
    drafter = LiLiCorrModel(
        LiLiCorrConfig.for_target(target.config, mask_token_id=3, block_size=BLOCK, head_type="none")
    )
    input_ids = torch.randint(4, 64, (1, 20))
    blocks = sample_blocks(input_ids, input_ids > 0, BLOCK, 6, torch.Generator().manual_seed(0))
    sums = run(JointObjective(drafter, target, Objective()), input_ids, blocks)
    outputs = target(input_ids, output_hidden_states=True)
    taps = torch.cat([outputs.hidden_states[i + 1] for i in drafter.config.target_layer_ids], dim=-1)
    expected = torch.zeros(())
    for n, p in enumerate(blocks.anchors[0].tolist()):
        states = drafter.decode_block(
            target.get_input_embeddings()(drafter.block_ids(input_ids[0, p : p + 1])),
            drafter.project_context(taps[:, :p]),
            torch.arange(p, p + BLOCK)[None],
            torch.arange(p)[None],
        )
        logits = target.lm_head(states[0, 1:])
        for slot in blocks.supervised[0, n].nonzero().flatten().tolist():
            weight = torch.exp(torch.tensor(-slot / 7.0))
            expected = expected - weight * logits[slot].log_softmax(-1)[blocks.labels[0, n, slot]]
    torch.testing.assert_close(sums["dflash"], expected, rtol=1e-4, atol=1e-4)
