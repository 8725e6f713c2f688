"""The same tokens as plain `generate`, on the real target: fp32, temperature 0, trained and untrained drafters."""

import pytest
import torch
from lilicorr import LiLiCorrConfig, LiLiCorrModel
from lilicorr.cli import EMBEDDED_DRAFTER
from lilicorr.evaluation.compare import answer, decoding_options, encode
from lilicorr.evaluation.loading import load_pair

pytestmark = pytest.mark.slow

NEW_TOKENS = 24
PROMPTS = [
    "What is 17 plus 26?",
    "A train travels 60 miles in 90 minutes. What is its speed in miles per hour?",
    "List the prime numbers below 30.",
    "A box holds 6 eggs. How many boxes do I need for 44 eggs?",
    "Solve for x: 3x + 5 = 20.",
    "What is 15 percent of 80?",
    "If a shirt costs 20 dollars and is reduced by a quarter, what does it cost?",
    "Name three even numbers and add them up.",
    "Write a Python function that reverses a string.",
    "Write a Python function that counts the vowels in a word.",
    "Explain what a for loop does in Python.",
    "Write a JavaScript function that adds two numbers.",
    "How do I read a file line by line in Python?",
    "Write an SQL query that selects all users older than 30.",
    "What does the command `ls -l` do?",
    "Write a bash script that prints the numbers 1 to 5.",
    "Why is the sky blue?",
    "What is photosynthesis?",
    "How do magnets work?",
    "What is the difference between a virus and a bacterium?",
    "Name the planets of the solar system in order.",
    "What causes the seasons?",
    "Explain gravity to a child.",
    "What is the boiling point of water at sea level?",
    "Write a short poem about the sea.",
    "Write the first two sentences of a story about a lighthouse.",
    "Give me three tips for sleeping better.",
    "Suggest a name for a bakery and say why.",
    "Write a polite email that asks for a day off.",
    "What should I pack for a week in the mountains?",
    "Summarise in one sentence: The cat sat on the mat because the floor was cold.",
    "Translate to French: Good morning, how are you?",
    "Correct the grammar: She don't like apples.",
    "Give a synonym for 'happy'.",
    "Who wrote Romeo and Juliet?",
    "What is the capital of Japan?",
    "Repeat the word 'yes' ten times.",
    "Count from 1 to 12.",
    "Say hello.",
    "Print a JSON object with the keys name and age.",
    "Decline an invitation kindly.",
]


@pytest.fixture(scope="module")
def pair(smollm2_folder):
    return load_pair(smollm2_folder, {}, dtype="fp32", device="cpu")


@pytest.fixture(scope="module")
def plain(pair):
    """What the target says to every prompt without help."""
    return [said(pair, prompt, None).token_ids for prompt in PROMPTS]


def said(pair, prompt, drafter):
    inputs = encode(pair.tokenizer, prompt, pair.target.device)
    return answer(pair.target, inputs, drafter, **decoding_options(NEW_TOKENS))


def assert_lossless(pair, plain, drafter, every=1):
    runs = [said(pair, prompt, drafter) for prompt in PROMPTS[::every]]
    asked = zip(PROMPTS[::every], runs, plain[::every], strict=True)
    assert [prompt for prompt, run, expected in asked if run.token_ids != expected] == []
    assert sum(run.trace.blocks for run in runs) > len(runs) >= 40 // every  # it did draft
    return runs


@pytest.mark.parametrize("head", ["none", "lilicorr"])
def test_random_weights_change_nothing(pair, plain, head):
    torch.manual_seed(0)
    config = LiLiCorrConfig.for_target(
        pair.target.config, head_type=head, block_size=6, num_hidden_layers=1, mask_token_id=16
    )
    assert_lossless(pair, plain, LiLiCorrModel(config).eval(), every=5)


@pytest.mark.parametrize("head", ["none", "lilicorr"])
def test_trained_weights_change_nothing(pair, plain, smollm2_folder, head):
    if not EMBEDDED_DRAFTER.is_dir():
        pytest.skip(f"the embedded checkpoint {EMBEDDED_DRAFTER.name} is not in this checkout")
    if head == "lilicorr":
        drafter = load_pair(smollm2_folder, {"drafter": EMBEDDED_DRAFTER}, dtype="fp32", device="cpu").drafters[
            "drafter"
        ]
    else:  # the trained backbone alone, each slot's likeliest token
        drafter = LiLiCorrModel.from_pretrained(EMBEDDED_DRAFTER, dtype=torch.float32)
        drafter = without_head(drafter)
    runs = assert_lossless(pair, plain, drafter, every=1 if head == "lilicorr" else 5)
    if head == "lilicorr":
        assert sum(run.trace.accepted for run in runs) > sum(run.trace.blocks for run in runs) / 2  # and it helps


def without_head(trained):
    settings = {**trained.config.to_dict(), "head_type": "none", "head_config": {}}
    bare = LiLiCorrModel(LiLiCorrConfig(**settings))
    weights = {k: v for k, v in trained.state_dict().items() if not k.startswith("lilicorr.")}
    bare.load_state_dict(weights)
    return bare.eval()
