"""The rules of CONTRIBUTING.md that a machine can check."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LAYERS = [["kernels"], ["candidate_generator"], ["modeling_lilicorr"], ["hub", "training", "evaluation"], ["explain"]]
LAYER = {room: layer for layer, rooms in enumerate(LAYERS) for room in rooms}
TRAVELLING = ("kernels", "modeling_lilicorr", "candidate_generator")  # inside every published checkpoint
# The face users call reaches up for a moment: saving writes the bundle and the card.
FACE = {"modeling_lilicorr.py", "repository.py"}


def sources(room: str) -> list[Path]:
    found = [path for path in sorted((ROOT / room).rglob("*.py")) if "checkpoints" not in path.relative_to(ROOT).parts]
    assert found, f"{room} holds no files: nothing would be checked"
    return found


def imported_rooms(path: Path) -> list[tuple[str, bool]]:
    """Rooms that a file imports at run time, each with whether the import stands at the top level."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    top_level = {node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))}
    typing_only = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    found = []
    for node in ast.walk(tree):
        if node in typing_only:
            continue
        if isinstance(node, ast.ImportFrom):
            names = [node.module or ""] if node.module else [alias.name for alias in node.names]
            if node.level == len(path.relative_to(ROOT).parts) or (
                node.level == 0 and (node.module or "").startswith("lilicorr.")
            ):
                found += [(name.removeprefix("lilicorr.").split(".")[0], node in top_level) for name in names]
        elif isinstance(node, ast.Import):
            found += [
                (alias.name.split(".")[1], node in top_level)
                for alias in node.names
                if alias.name.startswith("lilicorr.")
            ]
    return [(room, top) for room, top in found if room in LAYER]


@pytest.mark.parametrize("room", LAYER)
def test_imports_run_one_way(room):
    for path in sources(room):
        for other, at_top in imported_rooms(path):
            upwards = LAYER[other] > LAYER[room]
            allowed = not upwards or (not at_top and path.name in FACE)
            assert allowed, f"{path.relative_to(ROOT)} imports {other}, which stands above {room}"


@pytest.mark.parametrize("room", TRAVELLING)
def test_travelling_rooms_need_only_torch_and_transformers(room):
    allowed = {"torch", "transformers", "triton", "safetensors", "huggingface_hub"} | set(sys.stdlib_module_names)
    for path in sources(room):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            for name in names:
                assert name.split(".")[0] in allowed, f"{path.relative_to(ROOT)} imports {name}"


def test_rooms_are_not_packages_of_their_own():
    rooms = [*LAYER, "benchmarks", "tests"]
    assert [str(path) for room in rooms for path in (ROOT / room).rglob("__init__.py")] == []


def test_hugging_face_kernels_is_not_shadowed(tmp_path):
    # From elsewhere no `kernels`, `hub` … of ours may be importable at the top level.
    code = (
        "import importlib.util, lilicorr.kernels.reference\n"
        f"for name in {list(LAYER)}:\n"
        "    spec = importlib.util.find_spec(name)\n"
        "    places = [] if spec is None else [spec.origin or '', *(spec.submodule_search_locations or [])]\n"
        f"    assert not any(str(place).startswith({str(ROOT)!r} + '/' + name) for place in places), (name, places)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_no_file_is_longer_than_500_lines():
    files = [*ROOT.glob("*.py"), *(path for room in [*LAYER, "benchmarks", "tests"] for path in sources(room))]
    long = {str(path.relative_to(ROOT)): n for path in files if (n := len(path.read_text("utf-8").splitlines())) > 500}
    assert len(files) > 10 and long == {}


def test_no_script_shadows_a_room_or_hugging_face_kernels():
    # `python benchmarks/x.py` puts benchmarks/ first on the path; Transformers would then import a kernels.py there.
    names = {path.stem for path in (ROOT / "benchmarks").iterdir()}
    assert not names & {*LAYER, "benchmarks", "tests"}


def test_tests_are_named_after_behaviours_and_not_numbered():
    names = [name for path in sources("tests") for name in re.findall(r"def (test_\w+)", path.read_text("utf-8"))]
    assert len(names) > 500 and [name for name in names if re.match(r"test_(row|case|item|issue)?_?\d", name)] == []
