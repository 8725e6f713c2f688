import json
import shutil

import pytest
from lilicorr.cli import app
from lilicorr.evaluation.command import ROWS
from lilicorr.evaluation.run import report_of
from typer.testing import CliRunner


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sets")
    for name, texts in (("mt-bench", ["abc", "hello there"]), ("gsm8k", ["12 + 30"])):
        rows = [
            {
                "id": f"{name}-{i}",
                "domain": "chat",
                "messages": [{"role": "user", "content": text}, {"role": "user", "content": "more"}],
            }
            for i, text in enumerate(texts)
        ]
        rows[0]["category"] = "writing"
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def run(folders, data, output, *more, drafters=("lilicorr", "none")):
    named = [f"--drafter={name}={folders / name}" for name in drafters]
    common = ["--target", folders / "target", "--data", data, "--output", output, "--dtype", "fp32", "--device", "cpu"]
    arguments = ["evaluate", *named, *common, "--max-new-tokens", 12, *more]
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def finished(tiny_folders, data, tmp_path_factory):
    output = tmp_path_factory.mktemp("evaluation")
    result = run(tiny_folders, data, output, "--seed", 1, "--seed", 2, "--poolings")
    assert result.exit_code == 0, result.output
    return output


@pytest.fixture
def copied(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "copied")


@pytest.fixture
def report(finished):
    return json.loads((finished / "report.json").read_text())


def assert_one_sentence(result, *words):
    assert result.exit_code == 1 and isinstance(result.exception, SystemExit)
    said = " ".join(result.output.split())
    assert "Traceback" not in said
    for word in words:
        assert word in said


def assert_columns_fit(text):
    for table in text.split("\n\n"):
        if table.startswith("|"):
            assert len({line.count("|") for line in table.splitlines()}) == 1


def test_report_of_greedy_and_sampled_runs(report):
    assert list(report["temperatures"]) == ["0", "1"] and report["questions"] == 3
    greedy, sampled = (report["temperatures"][name]["all"] for name in ("0", "1"))
    assert list(greedy["sets"]) == ["gsm8k", "mt-bench"] and set(greedy["categories"]) == {"chat", "writing"}
    assert greedy["total"]["answers"] == 3 and sampled["total"]["answers"] == 6 and sampled["total"]["seeds"] == [1, 2]
    assert list(greedy["total"]["arms"]) == ["plain", "lilicorr", "lilicorr, chain", "none", "none, chain"]
    for name in ("lilicorr", "none", "none, chain"):
        figures = greedy["total"]["arms"][name]
        assert figures["equal"] == 3 and figures["largest_logit_gap"] is None
        assert figures["acceptance_length"] <= 1 + sum(figures["acceptance_by_slot"])
        assert set(figures["shares"]) == {"draft", "target"} and 0 < sum(figures["shares"].values()) < 1
        over_seeds = sampled["total"]["arms"][name]["over_seeds"]
        assert all(over_seeds[key]["runs"] == 2 for key in ("acceptance_length", "tokens_per_second", "speed_up"))
        assert over_seeds["speed_up"]["min"] <= over_seeds["speed_up"]["median"] <= over_seeds["speed_up"]["max"]
    assert greedy["total"]["arms"]["plain"]["over_seeds"]["speed_up"]["median"] == 1
    assert report["settings"]["machine"]["torch"] and report["settings"]["plan"]["seeds"] == [1, 2]


def test_coverage_is_counted_beside_the_timed_runs(report):
    counted = report["coverage"]["lilicorr"]["all"]
    assert 0 < counted["blocks"] <= 3 * 4 and len(counted["by_slot"]) == 4
    assert all(slot == sorted(slot) and slot[-1] <= 1 for slot in counted["by_slot"])
    assert 1 <= counted["greedy"] <= 5 and 1 <= counted["exact"] <= 5
    assert report["coverage"]["none"]["all"]["exact"] is None
    assert set(report["coverage"]["none"]["sets"]) == {"gsm8k", "mt-bench"}


def test_markdown_has_the_papers_tables(finished):
    text = (finished / "report.md").read_text()
    for number in (1, 3, 5, 7, 9, 12, 13):
        assert f"Table {number})" in text
    assert "| Greedy, T = 0 | GSM8K |" in text and "| Sampling, T = 1 | GSM8K |" in text
    assert "| 3 of 3 |" in text and "Average" in text and "other poolings" in text
    assert_columns_fit(text)


def test_plots_or_the_reason_for_none(finished, monkeypatch):
    pytest.importorskip("matplotlib")
    text = (finished / "report.md").read_text()
    for name in ("speed_up", "acceptance_length", "slots", "coverage"):
        assert f"({name}.png)" in text and (finished / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_report_says_so(copied, tiny_folders, data, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    result = run(tiny_folders, data, copied, "--seed", 1, "--seed", 2)
    assert result.exit_code == 0, result.output
    assert "No plots: matplotlib is not installed (pip install 'lilicorr[eval]')." in (copied / "report.md").read_text()


def test_resumes_by_prompt_after_a_torn_line(copied, tiny_folders, data):
    rows = copied / ROWS
    lines = rows.read_text().splitlines(keepends=True)
    assert len(lines) == 4
    rows.write_text("".join(lines[:3]) + lines[3][:50])
    (copied / "report.json").unlink()
    result = run(tiny_folders, data, copied, "--seed", 1, "--seed", 2)
    assert result.exit_code == 0, result.output
    again = rows.read_text().splitlines(keepends=True)
    assert again[:3] == lines[:3] and len(again) == 4

    def said(line):
        return [
            {name: (arm["new_tokens"], arm["trace"], arm["equal"]) for name, arm in one["arms"].items()}
            for one in json.loads(line)["asked"]
        ]

    assert said(again[3]) == said(lines[3])  # draws belong to the prompt, whatever was asked before
    assert json.loads((copied / "report.json").read_text())["questions"] == 3


def test_fewer_prompts_are_a_part_of_the_finished_rows(copied, tiny_folders, data):
    before = (copied / ROWS).read_bytes()
    result = run(tiny_folders, data, copied, "--seed", 1, "--seed", 2, "--prompts", 2)
    assert result.exit_code == 0, result.output
    assert (copied / ROWS).read_bytes() == before
    assert json.loads((copied / "report.json").read_text())["questions"] == 2


def test_rows_of_other_settings_are_refused(copied, tiny_folders, data):
    before = (copied / ROWS).read_bytes()
    result = run(tiny_folders, data, copied, "--seed", 3)
    assert_one_sentence(result, "rows of other settings (plan.seeds was [1, 2], is [3])", "another --output")
    result = run(tiny_folders, data, copied, "--seed", 1, "--seed", 2, drafters=("none",))
    assert_one_sentence(result, "drafters.lilicorr")
    assert (copied / ROWS).read_bytes() == before


def test_another_checkpoint_under_the_same_name_is_refused(copied, tiny_folders, data, tmp_path):
    folders = tmp_path / "pair"
    shutil.copytree(tiny_folders, folders)
    rows = copied / ROWS
    rows.write_text(rows.read_text().replace(str(tiny_folders), str(folders)))
    arguments = ("--seed", 1, "--seed", 2)
    assert run(folders, data, copied, *arguments).exit_code == 0
    settings = json.loads((folders / "none" / "config.json").read_text())
    (folders / "none" / "config.json").write_text(json.dumps(settings | {"transformers_version": "5.0.0"}))
    assert_one_sentence(run(folders, data, copied, *arguments), "drafters.none.weights")


def test_arms_and_nodes_are_chosen(tiny_folders, data, tmp_path):
    arguments = ("--seed", 1, "--prompts", 1, "--coverage-blocks", 0, "--nodes", 3)
    result = run(
        tiny_folders, data, tmp_path / "out", *arguments, "--arms", "tree,tree without text",
        "--arms", "prompt lookup 3", drafters=("none",),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["settings"]["plan"]["nodes"] == 3
    for temperature in ("0", "1"):
        arms = report["temperatures"][temperature]["all"]["total"]["arms"]
        assert list(arms) == ["plain", "prompt lookup 3", "none", "none, without text"]
        assert arms["none"]["drafted_per_pass"] <= 3 and arms["prompt lookup 3"]["tokens_per_pass"] >= 1
    assert all(figures["equal"] == 1 for figures in report["temperatures"]["0"]["all"]["total"]["arms"].values())
    text = (tmp_path / "out" / "report.md").read_text()
    assert "## Candidates" not in text and "| tokens a pass |" in text
    assert_columns_fit(text)


@pytest.mark.parametrize("arms", ["chain", "prompt lookup 10"])
def test_one_kind_of_arm_alone_is_a_report(tiny_folders, data, tmp_path, arms):
    arguments = ("--temperature", 0, "--prompts", 1, "--coverage-blocks", 0, "--arms", arms)
    result = run(tiny_folders, data, tmp_path / "out", *arguments)
    assert result.exit_code == 0, result.output
    assert_columns_fit((tmp_path / "out" / "report.md").read_text())


def test_all_turns_build_on_plain_answers(tiny_folders, data, tmp_path):
    arguments = ("--temperature", 0, "--turns", "all", "--benchmarks", "gsm8k", "--greedy-runs", 2)
    result = run(tiny_folders, data, tmp_path, *arguments, drafters=("none",))
    assert result.exit_code == 0, result.output
    asked = json.loads((tmp_path / ROWS).read_text().splitlines()[1])["asked"]
    assert [(one["seed"], one["turn"]) for one in asked] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert asked[1]["prompt_tokens"] > asked[0]["prompt_tokens"] + len("more")
    assert "Table 9" in (tmp_path / "report.md").read_text()


@pytest.mark.parametrize("more", [{}, {"asked": 3}, {"asked": [{"arms": {"plain": {"seconds": 1}}}]}])
def test_a_row_that_holds_too_little_is_named(more):
    row = {"key": "gsm8k/1", **({"set": "gsm8k", "category": "math", **more} if more else {})}
    with pytest.raises(ValueError, match=r"The row of 'gsm8k/1' is not as an evaluation writes it .*remove its line"):
        report_of({"drafters": {}}, [row])


def test_questions_beyond_the_context_are_left_out_and_told(tiny_folders, data, tmp_path):
    long = tmp_path / "long.jsonl"
    long.write_text(json.dumps({"messages": [{"role": "user", "content": "a" * 3000}]}))
    arguments = ("--temperature", 0, "--data", long)
    result = run(tiny_folders, data, tmp_path / "out", *arguments, drafters=("none",))
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["questions"] == 3 and "exceed the context of 2048" in next(iter(report["left_out"].values()))
    assert "Left out or cut short: 1 questions" in (tmp_path / "out" / "report.md").read_text()
    only = run(tiny_folders, long, tmp_path / "only", "--temperature", 0, drafters=("none",))
    assert_one_sentence(only, "No question was answered, since 3000 prompt")


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--turns", "last"), "expected first or all"),
        (("--benchmarks", "gsm9k"), "There is no set 'gsm9k'"),
        (("--seed", 1, "--seed", 1), "each once"),
        (("--temperature", "inf"), "finite"),
        (("--temperature", 1e-38), "temperature is 1e-38, expected 0, which is greedy"),
        (("--drafter", "plain=x"), "name=folder"),
        (("--arms", "trees"), "There is no arm 'trees'"),
        (("--dtype", "int3"), "int3"),
    ],
)
def test_wrong_options_are_one_sentence(tiny_folders, data, tmp_path, more, words):
    assert_one_sentence(run(tiny_folders, data, tmp_path / "out", *more), words)
    assert not (tmp_path / "out").exists()


def test_an_output_that_is_a_file_is_said_first(tiny_folders, data, tmp_path):
    (tmp_path / "file").write_text("")
    assert_one_sentence(run(tiny_folders, data, tmp_path / "file"), "cannot be written")
