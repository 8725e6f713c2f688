import ast
import sys
from pathlib import Path

import pytest
from lilicorr.hub.bundle import BundleError, build_bundle
from transformers.dynamic_module_utils import get_relative_import_files

ALLOWED = {"torch", "transformers", "safetensors", "huggingface_hub", "triton"}


def write(root: Path, **files: str) -> Path:
    for name, text in files.items():
        room, stem = name.split("__")
        (root / room).mkdir(exist_ok=True)
        (root / room / f"{stem}.py").write_text(text)
    return root


def test_a_repository_is_flat(checkpoint):
    assert [path.name for path in checkpoint.iterdir() if not path.is_file()] == ["custom_generate"]
    bundle = build_bundle()
    assert {path.name: path.read_text("utf-8") for path in checkpoint.glob("*.py")} == bundle
    for name, text in bundle.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ImportFrom) and node.level:
                assert node.level == 1 and f"{node.module}.py" in bundle, (name, node.module)


def test_every_file_is_named_from_the_entry(checkpoint):
    found = {Path(name).name for name in get_relative_import_files(checkpoint / "modeling_lilicorr.py")}
    assert found | {"modeling_lilicorr.py"} == {path.name for path in checkpoint.glob("*.py")}
    # The Hub path of Transformers asks each file for its own imports, the configuration among the first.
    assert "configuration_lilicorr.py" in found


def test_bundle_needs_only_torch_transformers_and_the_standard_library():
    for name, text in build_bundle().items():
        for node in ast.walk(ast.parse(text)):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                modules = [node.module]
            for module in modules:
                top = module.split(".")[0]
                assert top in ALLOWED or top in sys.stdlib_module_names, (name, module)


def test_imports_are_followed_and_rewritten_wherever_they_stand(tmp_path):
    write(
        tmp_path,
        room__entry="from .near import (\n    a,\n    b,\n)\n\ndef f():\n    from ..other.far import c\n",
        room__near="a = b = 1\n",
        other__far="from ..room.near import a as c\n",
        other__unused="",
    )
    bundle = build_bundle(tmp_path, "room/entry.py")
    assert list(bundle) == ["entry.py", "far.py", "near.py"]
    assert "from .near import (\n    a,\n    b,\n)" in bundle["entry.py"]
    assert "    from .far import c\n" in bundle["entry.py"]
    assert bundle["far.py"] == "from .near import a as c\n"


def test_two_files_of_one_name_are_refused(tmp_path):
    write(tmp_path, room__entry="from .same import a\nfrom ..other.same import b\n", room__same="", other__same="")
    with pytest.raises(BundleError, match=r"same\.py and .*same\.py would both become same\.py"):
        build_bundle(tmp_path, "room/entry.py")


@pytest.mark.parametrize(
    "line",
    [
        "from . import near",
        "from .. import other",
        "from ..other import far",
        "import lilicorr",
        "from lilicorr.x import y",
    ],
)
def test_imports_that_cannot_be_flat_are_refused(tmp_path, line):
    write(tmp_path, room__entry=f"import os\n{line}\n", room__near="", other__far="")
    with pytest.raises(BundleError, match=r"entry\.py line 2"):
        build_bundle(tmp_path, "room/entry.py")
