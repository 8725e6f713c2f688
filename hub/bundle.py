"""The flat code that travels with a checkpoint: Transformers fetches only files beside the one it imports.

Starting from the model's file, every package import is followed and rewritten: `from ..kernels.tiled import topk`
becomes `from .tiled import topk`, and each file lands in one folder under its own name.
"""

import ast
import re
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
ENTRY = "modeling_lilicorr/modeling_lilicorr.py"
CUSTOM_GENERATE = "candidate_generator/custom_generate.py"  # published as custom_generate/generate.py


class BundleError(ValueError):
    """The package's code cannot be flattened as it is written."""


def build_bundle(root: Path = PACKAGE, entry: str = ENTRY) -> dict[str, str]:
    """Flat file names and contents of `entry` and of all it imports from the package, directly or not.

    Args:
        root: folder of the package, whose subfolders are its rooms.
        entry: the file to start from, relative to `root`.

    Raises:
        BundleError: two files would get the same name, or an import cannot be resolved once the files are flat.
    """
    bundle: dict[str, str] = {}
    origin: dict[str, Path] = {}
    pending = [root / entry]
    while pending:
        path = pending.pop()
        if path.name in origin:
            if origin[path.name] != path:
                raise BundleError(
                    f"{origin[path.name].relative_to(root)} and {path.relative_to(root)} would both become "
                    f"{path.name} in the flat bundle; rename one of them."
                )
            continue
        origin[path.name] = path
        bundle[path.name], needed = _flatten(path, root)
        pending += needed
    return dict(sorted(bundle.items()))


def released_code(root: Path = PACKAGE) -> dict[str, str]:
    """Names and contents of all code files of a published repository."""
    return {**build_bundle(root), "custom_generate/generate.py": (root / CUSTOM_GENERATE).read_text("utf-8")}


def _flatten(path: Path, root: Path) -> tuple[str, list[Path]]:
    """The text of `path` with its package imports made flat, and the files these name."""
    lines = path.read_text("utf-8").splitlines(keepends=True)
    needed = []
    for node in ast.walk(ast.parse("".join(lines))):
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        if isinstance(node, ast.Import) or node.level == 0:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            if any(name.split(".")[0] == "lilicorr" for name in names):
                raise _error(path, root, node, "uses the package's name, which is not there; make it relative")
            continue
        folder = path.parents[node.level - 1]
        target = folder.joinpath(*(node.module or "").split(".")).with_suffix(".py")
        if not node.module or not target.is_file():
            raise _error(path, root, node, "does not name a file; write `from ..room.file import name`")
        index = node.lineno - 1
        lines[index], count = re.subn(
            r"from\s+\.+[\w.]+\s+import\b", f"from .{target.stem} import", lines[index], count=1
        )
        if not count:
            raise _error(path, root, node, "must have `from` and `import` on one line")
        needed.append(target)
    return "".join(lines), needed


def _error(path: Path, root: Path, node: ast.Import | ast.ImportFrom, what: str) -> BundleError:
    return BundleError(f"{path.relative_to(root)} line {node.lineno}: this import {what}.")
