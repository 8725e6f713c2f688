"""The command line as users meet it: what is wrong is said at once, on any console, and waits are seen."""

import json
import os
import subprocess
import sys

import lilicorr
import pytest
import torch
from lilicorr.cli import app
from lilicorr.evaluation.compare import Answer, Comparison, Difference
from lilicorr.evaluation.drawing import comparison_table, explain_differences
from lilicorr.evaluation.loading import load_pair
from lilicorr.hub import precision, sources
from rich.console import Console
from transformers import AutoModel, AutoTokenizer
from typer.testing import CliRunner

VERBS = ("demo", "generate", "explain", "regenerate", "train", "evaluate", "replay", "publish", "verify")
WITHOUT_TORCH = """
import json, sys
for name in ("torch", "transformers", "accelerate"):
    sys.modules[name] = None  # whoever imports it fails: it takes seconds
sys.argv[0] = "lilicorr"
from lilicorr.cli import app
from typer.testing import CliRunner
said = {}
for name, arguments in json.load(open(sys.argv[1], encoding="utf-8")).items():
    result = CliRunner().invoke(app, arguments)
    assert isinstance(result.exception, SystemExit), (name, result.exception, result.output)
    said[name] = (result.exit_code, result.output)
print(json.dumps(said))
"""


def in_a_process(*command, **environment):
    """A finished process of this Python, with bytes as they came."""
    return subprocess.run(
        [sys.executable, *command], env=os.environ | environment, capture_output=True, check=False, timeout=300
    )


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    root = tmp_path_factory.mktemp("places")
    (root / "empty.jsonl").write_text("")
    (root / "folder").mkdir()
    (root / "one.jsonl").write_text('{"id": "1", "messages": [{"role": "user", "content": "a"}]}\n')
    (root / "recipe.yaml").write_text("head_type: none\n")
    model = root / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "llama"}')
    (root / "torn").mkdir()
    (root / "torn" / "config.json").write_text("")
    return {path.name: str(path) for path in root.iterdir()} | {"absent": str(root / "absent.jsonl"), "root": str(root)}


def test_what_is_wrong_is_one_sentence_before_torch_is_imported(places, tmp_path):
    absent, folder, empty, torn = (places[name] for name in ("absent", "folder", "empty.jsonl", "torn"))
    one, recipe, model, out = places["one.jsonl"], places["recipe.yaml"], places["model"], str(tmp_path / "out")
    evaluated = ["evaluate", "--output", out, "--target", model]
    replayed = ["replay", "--output", out, "--target", model]
    trained = ["train", recipe, "--output", out, "--target", model]
    wrong = {f"{verb} option": [verb, "--bogus", "1"] for verb in VERBS} | {
        f"{verb} dtype": [*arguments, "--dtype", "int3"]
        for verb, arguments in {
            "demo": ["demo"],
            "generate": ["generate"],
            "explain": ["explain"],
            "regenerate": ["regenerate", one, "--output", out],
            "evaluate": [*evaluated, "--drafter", f"a={model}", "--data", one],
            "replay": [*replayed, "--drafter", f"a={model}", "--answers", one],
        }.items()
    }
    for name, path in {"missing": absent, "file or folder": "", "empty": ""}.items():
        file = {"missing": absent, "file or folder": folder, "empty": empty}[name]
        model_path = path or {"file or folder": one, "empty": torn}[name]
        wrong |= {
            f"demo {name}": ["demo", "--drafter", model_path],
            f"generate drafter {name}": ["generate", "--drafter", model_path],
            f"generate target {name}": ["generate", "--target", model_path, "--drafter", model],
            f"explain drafter {name}": ["explain", "--drafter", model_path],
            f"explain target {name}": ["explain", "--target", model_path, "--drafter", model],
            f"train recipe {name}": ["train", file, "--data", one, "--output", out, "--target", model],
            f"train data {name}": [*trained, "--data", file],
            f"train target {name}": ["train", recipe, "--data", one, "--output", out, "--target", model_path],
            f"train init {name}": [*trained, "--data", one, "--init", model_path],
            f"regenerate target {name}": ["regenerate", one, "--output", out, "--target", model_path],
            f"evaluate data {name}": [*evaluated, "--drafter", f"a={model}", "--data", file],
            f"evaluate drafter {name}": [*evaluated, "--drafter", f"a={model_path}", "--data", one],
            f"replay answers {name}": [*replayed, "--drafter", f"a={model}", "--answers", file],
            f"publish checkpoint {name}": ["publish", model_path, "someone/drafter"],
            f"verify {name}": ["verify", model_path],
            f"replay drafter {name}": [*replayed, "--drafter", f"a={model_path}", "--answers", one],
        }
        if name != "file or folder":  # a folder of prompts is a data set
            wrong[f"regenerate {name}"] = ["regenerate", file, "--output", out, "--target", model]
    wrong |= {
        "no verb of that name": ["generat"],
        "an option before the verb": ["--bogus"],
        "a target without its drafter": ["generate", "--target", model],
        "a target to explain without its drafter": ["explain", "--target", model],
        "a page that is a folder": ["explain", "--output", folder],
        "a page in a file": ["explain", "--output", f"{one}/page.html"],
        "an unknown recipe": ["train", "gpt-9", "--data", one, "--output", out],
    }
    (tmp_path / "wrong.json").write_text(json.dumps(wrong))
    done = in_a_process("-c", WITHOUT_TORCH, str(tmp_path / "wrong.json"))
    assert done.returncode == 0, done.stderr.decode()
    said = json.loads(done.stdout)
    assert set(said) == set(wrong)
    for name, (code, output) in said.items():
        assert code in (1, 2) and output.count("\n") == 1, (name, output)  # one line
        assert output.rstrip().endswith(".") and (";" in output or "expected" in output), (name, output)
    assert not (tmp_path / "out").exists()


def test_the_package_is_a_command_and_has_a_version():
    done = in_a_process("-m", "lilicorr", "--help")
    assert done.returncode == 0 and all(verb in done.stdout.decode() for verb in VERBS)
    assert lilicorr.__version__.split(".")[0].isdigit()


def test_the_classes_are_there_whenever_they_are_asked_for():
    code = (
        "import sys; sys.argv[0] = 'lilicorr'\n"
        "import lilicorr\n"
        "assert 'torch' not in sys.modules\n"
        "from transformers import AutoModel\n"
        "from lilicorr import LiLiCorrConfig\n"
        "few = dict.fromkeys(['num_hidden_layers', 'num_attention_heads', 'num_key_value_heads'], 1)\n"
        "sizes = dict.fromkeys(['hidden_size', 'intermediate_size', 'head_dim'], 8)\n"
        "made = AutoModel.from_config(LiLiCorrConfig(head_type='none', **few, **sizes))\n"
        "assert type(made) is lilicorr.LiLiCorrModel\n"
    )
    done = in_a_process("-c", code)
    assert done.returncode == 0, done.stderr.decode()
    with pytest.raises(AttributeError, match="has no attribute 'Lilicor'"):
        lilicorr.Lilicor  # noqa: B018


def test_a_mistyped_name_offline_is_answered_at_once_but_kept_repositories_load(monkeypatch, tmp_path):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(sources, "_hub_answers", lambda: False)
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_: None)
    with pytest.raises(ValueError, match="drafter no-such could not be loaded: there is no such folder, and the Hub"):
        sources.check_reachable("drafter", "no-such")
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_: "/kept/config.json")
    sources.check_reachable("drafter", "kept/drafter")
    monkeypatch.setattr(sources, "_hub_answers", lambda: True)
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_: None)
    sources.check_reachable("drafter", "new/drafter")


def test_generate_without_names_uses_the_embedded_pair(tiny_folders, monkeypatch):
    monkeypatch.setattr("lilicorr.cli.smollm2", lambda: tiny_folders / "target")
    monkeypatch.setattr("lilicorr.cli.EMBEDDED_DRAFTER", tiny_folders / "none")
    arguments = ["generate", "--prompt", "abc", "--max-new-tokens", "6", "--dtype", "fp32", "--device", "cpu"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "1 of 1 equal" in " ".join(result.output.split())


def test_the_same_dtypes_everywhere(monkeypatch):
    monkeypatch.setattr(precision, "_cpu_has", lambda check: False)
    cpu = torch.device("cpu")
    found = [precision.torch_dtype(name, cpu) for name in ("auto", "fp32", "bf16", "fp16", "float32")]
    assert found == [torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.float32]
    assert [precision.torch_name(name) for name in ("fp32", "bfloat16", "fp16")] == ["float32", "bfloat16", "float16"]
    with pytest.raises(ValueError, match="dtype is 'fp64', expected one of auto, fp32, bf16, fp16"):
        precision.torch_name("fp64")


def words_of_generate(place):
    named = ["--target", str(place / "target"), "--drafter", str(place / "none")]
    return ["generate", *named, "--prompt", "abc ✓ 中", "--max-new-tokens", "24", "--dtype", "fp32", "--device", "cpu"]


def test_a_process_prints_on_a_console_that_is_not_utf_8(tiny_folders):
    command = ["-m", "lilicorr", *words_of_generate(tiny_folders)]
    done = in_a_process(*command, PYTHONIOENCODING="ascii", PYTHONUTF8="0", COLUMNS="120")
    assert done.returncode == 0, done.stderr.decode("ascii")
    assert "1 of 1 equal" in done.stdout.decode("ascii") and "one block" in done.stdout.decode("ascii")


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "gbk"])
def test_verbs_print_on_consoles_of_any_encoding(encoding, tiny_folders):
    result = CliRunner(charset=encoding).invoke(app, words_of_generate(tiny_folders), env={"COLUMNS": "120"})
    assert result.exit_code == 0, result.output
    assert "1 of 1 equal" in result.stdout and "one block" in result.stdout


def test_a_dry_run_prints_where_the_console_is_ascii(tiny_folders, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(tiny_folders / "target")
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] + '.' }}{% endfor %}"
    target = tmp_path / "target"
    target.mkdir()
    for file in (tiny_folders / "target").iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    tokenizer.save_pretrained(target)
    messages = [{"role": "user", "content": "é"}, {"role": "assistant", "content": "a"}]
    row = {"id": "1", "messages": messages, "output_ids": list(range(40))}
    (tmp_path / "answers.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "recipe.yaml").write_text(
        "head_type: none\nblock_size: 4\nbatch_size: 1\nconfig: {mask_token_id: 260}\n"
    )
    arguments = ["train", tmp_path / "recipe.yaml", "--data", tmp_path / "answers.jsonl", "--output", tmp_path / "out"]
    arguments = [*map(str, arguments), "--target", str(target), "--dry-run"]
    result = CliRunner(charset="ascii").invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "Parameters: target" in result.stdout and result.stdout.isascii()


@pytest.mark.skipif(os.name == "nt", reason="arguments are text there")
@pytest.mark.parametrize("verb", ["generate", "train"])
def test_a_prompt_that_is_not_utf_8_is_one_sentence(verb):
    done = in_a_process("-m", "lilicorr", verb, "--prompt", b"caf\xe9")
    assert done.returncode == 1 and b"is not UTF-8 text; give it in UTF-8." in done.stderr
    assert done.stderr.count(b"\n") == 1


def test_waits_are_seen_where_there_is_no_terminal(tiny_folders, tmp_path):
    (tmp_path / "set.jsonl").write_text('{"messages": [{"role": "user", "content": "abc"}]}\n')
    named = ["--target", str(tiny_folders / "target"), "--drafter", f"none={tiny_folders / 'none'}"]
    few = ["--max-new-tokens", "4", "--seed", "1", "--dtype", "fp32", "--device", "cpu"]
    arguments = ["evaluate", *named, "--data", str(tmp_path / "set.jsonl"), "--output", str(tmp_path / "out"), *few]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    lines = result.stderr.splitlines()
    assert lines[0].startswith("Loading target and drafters")
    assert "0/2" in lines[1] and any("2/2" in line for line in lines[2:])  # one prompt, greedy and sampled
    assert "\r" not in result.stderr


def test_our_own_errors_are_not_said_to_be_the_users(tiny_folders, tmp_path, monkeypatch):
    def broken(*_, **__):
        raise AttributeError("a bug of ours")

    named = ["--target", str(tiny_folders / "target"), "--drafter", str(tiny_folders / "none"), "--device", "cpu"]
    monkeypatch.setattr("lilicorr.evaluation.compare.warm_up", broken)
    assert isinstance(CliRunner().invoke(app, ["generate", *named]).exception, AttributeError)
    monkeypatch.setattr(AutoModel, "from_pretrained", broken)
    with pytest.raises(AttributeError, match="a bug of ours"):
        load_pair(tiny_folders / "target", {"none": tiny_folders / "none"}, device="cpu")
    monkeypatch.undo()

    def full(*_, **__):
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried 8 TB")

    monkeypatch.setattr("lilicorr.evaluation.compare.warm_up", full)
    result = CliRunner().invoke(app, ["generate", *named])
    assert result.exit_code == 1 and "There is too little memory" in result.output


def test_a_drafter_has_no_tokenizer_and_is_no_target(tiny_folders):
    for call in (
        lambda: AutoTokenizer.from_pretrained(tiny_folders / "none"),
        lambda: load_pair(tiny_folders / "none", {"none": tiny_folders / "none"}, device="cpu"),
    ):
        with pytest.raises(ValueError, match=r"none holds a drafter, which has no (tokenizer|target)") as caught:
            call()
        assert len(str(caught.value).splitlines()) == 1


def compared(index, gap, prompt="Explain in simple words why the sky is blue."):
    difference = None if index is None else Difference(index, gap)
    answers = Answer(tuple(range(40, 168)), 5.0), Answer(tuple(range(41, 169)), 4.0)
    return Comparison(prompt, *answers, difference is None, difference)


@pytest.mark.parametrize("width", [80, 120])
def test_the_comparison_fits_a_terminal_with_a_line_for_every_prompt(width):
    table = comparison_table([compared(None, None), compared(104, 0.0625), compared(3, 9.0)], torch.bfloat16)
    console = Console(width=width, record=True, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(table)
    rows = [line for line in console.export_text().splitlines() if line.startswith("│")]
    cells = [[cell.strip() for cell in row.split("│")[1:-1]] for row in rows]
    assert [row[-1] for row in cells] == ["equal", "tie", "differs", "1 of 3 equal"]
    assert all(cell and "…" not in cell for row in cells for cell in row[1:])


def test_a_tie_is_explained_and_a_real_difference_is_not_called_one(tiny_folders):
    tokenizer = AutoTokenizer.from_pretrained(tiny_folders / "target")
    tie, *why = explain_differences([compared(None, None), compared(4, 0.0625)], tokenizer, torch.bfloat16)
    assert tie.startswith("Prompt 2, token 5: the target finds “") and "to within 6.4%" in tie
    assert len(why) == 1 and "--dtype fp32 they are the same" in why[0]
    for dtype, gap in ((torch.bfloat16, 3.0), (torch.float32, 0.01)):
        (said,) = explain_differences([compared(4, gap)], tokenizer, dtype)
        assert "must not happen" in said
    assert list(explain_differences([compared(None, None)], tokenizer, torch.float32)) == []
    (said,) = explain_differences([compared(4, None)], tokenizer, torch.bfloat16)
    assert "one output ends" in said


def test_the_last_line_says_what_each_way_makes_of_a_second():
    from lilicorr.evaluation.compare import Answer, Comparison
    from lilicorr.evaluation.drawing import summary_line

    ids = tuple(range(20))
    plain, lookup, assisted = Answer(ids, 2.0), Answer(ids, 1.0), Answer(ids, 0.5)
    both = [Comparison("a", plain, assisted, True, None, lookup)] * 2
    assert summary_line(both) == "Tokens/s: plain 10.0, prompt lookup 20.0, with the drafter 40.0 (4.00× plain)."
    slow = summary_line([Comparison("a", plain, Answer(ids, 4.0), None)])
    assert slow.startswith("Tokens/s: plain 10.0, with the drafter 5.0 (0.50× plain: here a tree's pass costs more")
