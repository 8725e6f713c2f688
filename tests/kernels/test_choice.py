"""Which implementation the two dispatchers choose, and what they say where none can serve."""

import subprocess
import sys

import pytest
import torch
from lilicorr.kernels import choice, reference, score_and_walk, topk_logsumexp

from .conftest import DEVICE
from .test_score_and_walk import SCALE, random_lattice, random_log_probs
from .test_topk_logsumexp import tied_logits

LOGITS = tied_logits(2, 100, torch.float32, 3, seed=0).to(DEVICE)


@pytest.fixture
def calls(monkeypatch):
    """Names of the implementations that the dispatchers call."""
    seen = []

    def spy(module, name, label):
        real = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda *arguments, **options: (seen.append(label), real(*arguments, **options))[1]
        )

    spy(topk_logsumexp, "defined", "reference")
    spy(topk_logsumexp, "tiled", "tiled")
    spy(score_and_walk, "defined", "reference")
    if choice.triton_installed():
        from lilicorr.kernels import topk_triton, walk_triton

        spy(topk_triton, "topk_logsumexp", "triton")
        spy(walk_triton, "walk", "triton")
    return seen


def lattice():
    return [tensor.to(DEVICE) for tensor in random_lattice(2, 3, 4, width=16)]


def all_doors():
    topk = [topk_logsumexp.topk_logsumexp(LOGITS, 4), topk_logsumexp.topk_features(LOGITS, 4)]
    paths = [score_and_walk.score_and_walk(*lattice(), SCALE, 1e-6, rule) for rule in score_and_walk.RULES]
    walked = score_and_walk.walk(*lattice(), SCALE, 1e-6)
    return topk, paths, walked


def assert_right(results) -> None:
    topk, paths, walked = results
    want = reference.topk_logsumexp(LOGITS, 4)
    for got in topk:
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
        torch.testing.assert_close(got[2], want[2])
    torch.testing.assert_close(topk[1][3], reference.confidence_features(want[0] - want[2][:, None]))
    for got, rule in zip(paths, score_and_walk.RULES, strict=True):
        wanted = reference.walk(*lattice(), SCALE, 1e-6, rule)
        assert torch.equal(got[0], wanted.tokens) and torch.equal(got[1], wanted.picks)
    wanted = reference.walk(*lattice(), SCALE, 1e-6)
    assert torch.equal(walked.tokens, wanted.tokens)
    torch.testing.assert_close(walked.first, wanted.first, rtol=0, atol=1e-5)
    torch.testing.assert_close(walked.pair, wanted.pair, rtol=0, atol=1e-5)


@pytest.mark.skipif(DEVICE == "cuda", reason="auto takes Triton here")
@pytest.mark.parametrize("value", [None, "", "auto"])
def test_auto_on_the_cpu_is_the_tiled_twin_and_the_reference(value, calls, monkeypatch) -> None:
    monkeypatch.delenv("LILICORR_KERNELS", raising=False)
    if value is not None:
        monkeypatch.setenv("LILICORR_KERNELS", value)
    assert_right(all_doors())
    assert calls == ["tiled"] * 2 + ["reference"] * 4


@pytest.mark.skipif(DEVICE == "cpu" or not choice.triton_installed(), reason="needs a GPU")
def test_auto_on_a_gpu_is_triton_unless_it_cannot_serve(calls, monkeypatch) -> None:
    monkeypatch.delenv("LILICORR_KERNELS", raising=False)
    assert_right(all_doors())
    assert set(calls) == {"triton"}
    calls.clear()
    topk_logsumexp.topk_logsumexp(LOGITS, 40)
    topk_logsumexp.topk_logsumexp(LOGITS.double(), 4)
    topk_logsumexp.topk_logsumexp(LOGITS.clone().requires_grad_(), 4)
    score_and_walk.score_and_walk(*(t.to(DEVICE) for t in random_lattice(2, 3, 17)), SCALE)
    assert calls == ["tiled", "tiled", "tiled", "reference"]


def test_one_switch_leaves_triton_out(calls, monkeypatch) -> None:
    monkeypatch.setenv("LILICORR_KERNELS", "reference")
    assert_right(all_doors())
    assert set(calls) == {"reference"}


@pytest.mark.skipif(not choice.triton_installed(), reason="needs triton")
def test_triton_serves_both_doors_interpreted_or_on_a_gpu(calls, monkeypatch) -> None:
    monkeypatch.setenv("LILICORR_KERNELS", "triton")
    assert_right(all_doors())
    assert set(calls) == {"triton"}


def test_an_unknown_value_is_one_sentence(monkeypatch) -> None:
    monkeypatch.setenv("LILICORR_KERNELS", "cuda")
    for dispatcher in (
        lambda: topk_logsumexp.topk_logsumexp(LOGITS, 4),
        lambda: score_and_walk.walk(*lattice(), SCALE),
    ):
        with pytest.raises(ValueError, match=r"^LILICORR_KERNELS is 'cuda'; set it to auto, reference or triton"):
            dispatcher()


def test_triton_refuses_what_it_cannot_honour(monkeypatch) -> None:
    monkeypatch.setenv("LILICORR_KERNELS", "triton")
    monkeypatch.setattr(choice, "triton_installed", lambda: True)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    crowded = [tensor.to(DEVICE) for tensor in random_lattice(2, 3, 17)]
    for call, reason in (
        (lambda: topk_logsumexp.topk_logsumexp(LOGITS, 33), "at most 32, got k = 33"),
        (lambda: topk_logsumexp.topk_features(LOGITS.double(), 4), "fp32, bf16 or fp16 logits, got torch.float64"),
        (lambda: topk_logsumexp.topk_logsumexp(LOGITS.clone().requires_grad_(), 4), "have no gradient"),
        (lambda: score_and_walk.score_and_walk(*crowded, SCALE), "at most 16 candidates a slot, got 17"),
    ):
        with pytest.raises(ValueError, match=rf"LILICORR_KERNELS=triton cannot serve this call: .*{reason}"):
            call()


def test_triton_without_gpu_interpreter_or_itself_says_so(monkeypatch) -> None:
    monkeypatch.setenv("LILICORR_KERNELS", "triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    logits = LOGITS.cpu()
    monkeypatch.setattr(choice, "triton_installed", lambda: True)
    with pytest.raises(ValueError, match="tensors on cpu need TRITON_INTERPRET=1"):
        topk_logsumexp.topk_logsumexp(logits, 4)
    monkeypatch.setattr(choice, "triton_installed", lambda: False)
    with pytest.raises(ValueError, match="it is not installed; set it to auto or reference"):
        topk_logsumexp.topk_logsumexp(logits, 4)


def test_every_kernel_file_imports_without_triton_and_auto_works() -> None:
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch\n"
        "from lilicorr.kernels import choice, score_and_walk, topk_logsumexp, topk_triton, walk_triton\n"
        "from lilicorr.kernels import lattice_attention_triton, lattice_nodes_triton, lattice_products_triton\n"
        "assert not choice.triton_installed()\n"
        "topk_logsumexp.topk_features(torch.zeros(2, 9), 3)\n"
        "score_and_walk.score_and_walk(*torch.rand(2, 1, 2, 3, 4), torch.rand(1, 4), torch.ones(1, 2, 3).long(), 8.0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_plain_cpu_use_imports_none_of_the_triton_kernels() -> None:
    code = (
        "import sys, torch\n"
        "from lilicorr.kernels import score_and_walk, topk_logsumexp\n"
        "topk_logsumexp.topk_logsumexp(torch.zeros(2, 9), 3)\n"
        "score_and_walk.score_and_walk(*torch.rand(2, 1, 2, 3, 4), torch.rand(1, 4), torch.ones(1, 2, 3).long(), 8.0)\n"
        "ours = [name for name in sys.modules if name.startswith('lilicorr.kernels.') and name.endswith('_triton')]\n"
        "assert ours == [], ours  # triton itself comes with torch's own compiler\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_lattices_of_wrong_shapes_are_refused_with_the_seen_shapes() -> None:
    out, inp, anchor_out, candidates = lattice()
    for given in (
        (out, inp[:, 1:], anchor_out, candidates),
        (out[0], inp[0], anchor_out, candidates),
        (out, inp, anchor_out[:, 1:], candidates),
        (out, inp, anchor_out, candidates[..., 1:]),
        (out[:, :0], inp[:, :0], anchor_out, candidates[:, :0]),
    ):
        with pytest.raises(ValueError, match=r"out and inp \[blocks, slots, K, d_e\]"):
            score_and_walk.score_and_walk(*given, SCALE)
    with pytest.raises(ValueError, match=r"A scale is a number or a tensor \[1\], got \[2\]"):
        score_and_walk.walk(*lattice(), torch.ones(2, device=DEVICE))
    with pytest.raises(ValueError, match=r"log_probs are \[blocks, slots, K\] .*, got \[2, 3\] and \[2, 3, 4\]"):
        score_and_walk.score_and_walk(*lattice(), SCALE, log_probs=torch.ones(2, 3, device=DEVICE))
    with pytest.raises(ValueError, match="walked by one of greedy, exact, longest, got 'best'"):
        score_and_walk.score_and_walk(*lattice(), SCALE, rule="best")


@pytest.mark.skipif(not choice.triton_installed(), reason="needs triton")
def test_every_form_of_the_door_takes_log_probs_and_a_gate(calls, monkeypatch) -> None:
    log_probs, gated = random_log_probs(2, 3, 4).to(DEVICE), torch.tensor([-2.5], device=DEVICE)
    for kernels in ("reference", "triton"):
        monkeypatch.setenv("LILICORR_KERNELS", kernels)
        calls.clear()
        walked = score_and_walk.walk(*lattice(), gated, 1e-6, log_probs=log_probs)
        for rule in score_and_walk.RULES:
            want = reference.walk(*lattice(), gated, 1e-6, rule, log_probs)
            torch.testing.assert_close(walked.pair, want.pair, rtol=0, atol=1e-5)
            got = score_and_walk.score_and_walk(*lattice(), gated, 1e-6, rule, log_probs)
            assert torch.equal(got[1], want.picks)
        assert calls == [kernels] * 4


def test_a_gate_that_learns_is_no_work_for_triton(monkeypatch) -> None:
    gate = torch.tensor([0.5], device=DEVICE, requires_grad=True)
    score_and_walk.walk(*lattice(), gate).pair.sum().backward()
    assert gate.grad is not None
    monkeypatch.setenv("LILICORR_KERNELS", "triton")
    monkeypatch.setattr(choice, "triton_installed", lambda: True)
    with pytest.raises(ValueError, match="have no gradient"):
        score_and_walk.walk(*lattice(), gate)
