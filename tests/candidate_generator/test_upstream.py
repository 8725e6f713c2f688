"""The change that docs/upstream.md proposes to Transformers applies, and does what the page says."""

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import transformers

PAGE = Path(__file__).parents[2] / "docs" / "upstream.md"

DECODE = """
import importlib.abc, importlib.util, sys

class Patched(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "transformers.generation.utils":
            return importlib.util.spec_from_file_location(name, sys.argv[1])

sys.meta_path.insert(0, Patched())
import torch
from transformers import AutoModelForCausalLM
from transformers.generation.utils import GenerationMixin
from lilicorr import LiLiCorrModel
from lilicorr.candidate_generator.hook import uninstall
from lilicorr.candidate_generator.lilicorr_generator import LiLiCorrCandidateGenerator

target = AutoModelForCausalLM.from_pretrained(sys.argv[2])
drafter = LiLiCorrModel.from_pretrained(sys.argv[3], decoding="stock")
uninstall()
assert GenerationMixin._get_candidate_generator.__code__.co_filename == sys.argv[1]
made = []
offer = drafter.get_candidate_generator
drafter.get_candidate_generator = lambda *given, **more: made.append(offer(*given, **more)) or made[-1]
ids = torch.arange(5, 12)[None]
options = dict(max_new_tokens=20, do_sample=False, eos_token_id=None)
assert torch.equal(target.generate(ids, **options), target.generate(ids, assistant_model=drafter, **options))
assert isinstance(made[0], LiLiCorrCandidateGenerator)
print("equal")
"""


@pytest.mark.skipif(not transformers.__version__.startswith("5.24."), reason="the page's diff is against 5.24")
@pytest.mark.skipif(shutil.which("git") is None, reason="git applies the diff")
def test_the_proposed_change_applies_and_makes_the_wrap_needless_for_chains(tmp_path, tiny_folders):
    (diff,) = re.findall(r"^```diff\n(.*?)^```$", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    (tmp_path / "proposed.diff").write_text(diff)
    found = importlib.util.find_spec("transformers.generation.utils")
    copy = tmp_path / "src" / "transformers" / "generation" / "utils.py"
    copy.parent.mkdir(parents=True)
    shutil.copy(found.origin, copy)
    applied = subprocess.run(
        ["git", "apply", "--verbose", "proposed.diff"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert applied.returncode == 0, applied.stderr
    command = [sys.executable, "-c", DECODE, str(copy), str(tiny_folders / "target"), str(tiny_folders / "lilicorr")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0 and done.stdout.endswith("equal\n"), done.stderr[-3000:]
