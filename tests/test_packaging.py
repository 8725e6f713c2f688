"""Wheels and source distributions work without the repository, and files about the project agree with each other."""

import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml
from lilicorr import __version__

ROOT = Path(__file__).parents[1]
LEFT_OUT = (".git", ".hypothesis", ".*_cache", ".venv", "__pycache__", "*.egg-info", "build", "dist", "runs", "shared")

INSTALLED = """
import sys
fresh = sys.argv[1]
sys.path.insert(0, fresh)
import lilicorr
from pathlib import Path
assert lilicorr.__file__ == fresh + "/lilicorr/__init__.py" and lilicorr.__version__ == sys.argv[2]
from transformers import AutoModel
from lilicorr.cli import EMBEDDED_DRAFTER, app
from lilicorr.hub.verify import verify_folder
from lilicorr.training.recipe_files import find_recipe
assert Path(find_recipe("qwen3-8b")).is_relative_to(fresh)
drafter = AutoModel.from_pretrained(EMBEDDED_DRAFTER)
drafter.save_pretrained(sys.argv[3])
verdict = verify_folder(sys.argv[3])
assert verdict.ok and len(verdict.equal) > 30
here = Path(lilicorr.__file__).parent
assert (here / "py.typed").is_file() and not (here / "tests").exists() and not (here / "benchmarks").exists()
print("works")
"""


def run(*command, **options):
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, check=False, timeout=500, **options
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel that was built from a source distribution, as an index would have both."""
    root = tmp_path_factory.mktemp("dist")
    shutil.copytree(ROOT, root / "tree", ignore=shutil.ignore_patterns(*LEFT_OUT))
    build = "from setuptools import build_meta; print(build_meta.build_sdist('../sdist'))"
    run(sys.executable, "-c", build, cwd=root / "tree")
    (source,) = (root / "sdist").iterdir()
    with tarfile.open(source) as archive:
        names = [name.partition("/")[2] for name in archive.getnames()]
    assert "README.md" in names and "LICENSE" in names and "py.typed" in names
    assert [name for name in names if name.startswith(("tests", "benchmarks", ".ci"))] == []
    offline = ("--no-index", "--no-deps", "--disable-pip-version-check")
    run(sys.executable, "-m", "pip", "wheel", *offline, "--no-build-isolation", "-w", root / "wheel", source)
    (built,) = (root / "wheel").iterdir()
    return built


def test_an_installed_wheel_works_without_the_repository(wheel, tmp_path):
    fresh = tmp_path / "fresh"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(fresh)
    arguments = (fresh, __version__, tmp_path / "saved")
    assert run(sys.executable, "-I", "-c", INSTALLED, *arguments, cwd=tmp_path).endswith("works\n")


def test_the_version_stands_in_one_place_and_the_citation_agrees():
    project = (ROOT / "pyproject.toml").read_text("utf-8")
    assert re.findall(r'^version = "(.*)"$', project, re.MULTILINE) == [__version__]
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert cited["version"] == __version__ and cited["license"] == "Apache-2.0"
    paper = cited["preferred-citation"]
    assert paper["title"].startswith("LiLiCorr: ") and "arXiv:2608.20530" in str(paper["identifiers"])


def test_the_checks_before_a_commit_are_local_and_those_of_ci():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text("utf-8"))["repos"]
    assert [repo["repo"] for repo in hooks] == ["local"]  # nothing is fetched
    entries = {hook["entry"].partition(" --")[0] for hook in hooks[0]["hooks"]}
    checks = (ROOT / ".ci" / "run").read_text("utf-8")
    assert entries == {"ruff check", "ruff format", "mypy"} and all(f"\n{entry}" in checks for entry in entries)


def test_workflows_and_issue_forms_can_be_read():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text("utf-8"))
    assert {"push", "pull_request"} <= workflow[True].keys()  # YAML reads `on` as true
    assert workflow["jobs"]["run"]["steps"][-1] == {"run": ".ci/run"}
    for path in (ROOT / ".github" / "ISSUE_TEMPLATE").iterdir():
        form = yaml.safe_load(path.read_text("utf-8"))
        assert form["name"] and form["description"] and form["body"], path.name
