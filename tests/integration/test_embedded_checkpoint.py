"""The drafter that comes with the repository: small, complete, and usable by people with nothing but Transformers."""

import os
import subprocess
import sys

import pytest
import torch
from lilicorr.cli import EMBEDDED_DRAFTER
from transformers import AutoModel

CLEAN_PROCESS = """
import sys
sys.modules["lilicorr"] = sys.modules["triton"] = None
import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer
folder, name = sys.argv[1:]
target, tokenizer = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32), AutoTokenizer.from_pretrained(name)
drafter = AutoModel.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32)
assert "transformers_modules" in type(drafter).__module__
chat = [{"role": "user", "content": "Name the planets of the solar system in order."}]
inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
plain = target.generate(**inputs, max_new_tokens=40, do_sample=False)
assisted = target.generate(**inputs, max_new_tokens=40, do_sample=False, assistant_model=drafter)
print(torch.equal(plain, assisted), drafter.last_generation.blocks)
"""


def test_it_is_small_and_loads_through_the_auto_classes():
    weights = EMBEDDED_DRAFTER / "model.safetensors"
    assert weights.stat().st_size <= 40 * 2**20
    drafter = AutoModel.from_pretrained(EMBEDDED_DRAFTER)
    assert drafter.dtype == torch.bfloat16
    assert drafter.config.head_type == "lilicorr" and drafter.config.vocab_size == 49152
    assert (EMBEDDED_DRAFTER / "README.md").is_file()


@pytest.mark.slow
def test_published_it_serves_people_without_this_package(tmp_path, smollm2_folder):
    AutoModel.from_pretrained(EMBEDDED_DRAFTER).save_pretrained(tmp_path / "published")
    finished = subprocess.run(
        [sys.executable, "-I", "-c", CLEAN_PROCESS, tmp_path / "published", smollm2_folder],
        env={**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules"), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 0, finished.stderr[-2000:]
    equal, blocks = finished.stdout.split()
    assert equal == "True" and 0 < int(blocks) < 39
