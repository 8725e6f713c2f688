"""What the code that travels with a checkpoint can do besides arithmetic, read off its syntax trees."""

import ast
import sys

import pytest
from lilicorr.hub.bundle import released_code

# Modules of the standard library that reach neither files nor network nor processes, nor run text as code.
HARMLESS = {
    *(
        "__future__",
        "collections",
        "collections.abc",
        "contextlib",
        "copy",
        "dataclasses",
        "functools",
        "heapq",
        "hashlib",
    ),
    *("inspect", "itertools", "json", "math", "re", "statistics", "threading", "time", "types", "typing", "warnings"),
    "weakref",
}
WATCHED = {"os", "tempfile", "importlib", "pathlib"}  # what of these is called is looked at
BUILTINS = {"eval", "exec", "compile", "__import__", "open", "input", "breakpoint", "globals", "__builtins__", "exit"}
OUTSIDE = {  # functions and classes of other packages that touch files or the network
    *("HfApi", "snapshot_download", "hf_hub_download", "cached_file", "safe_open", "save_file", "load_file"),
    *("CommitOperationAdd", "CommitOperationDelete", "get_class_from_dynamic_module", "load_inline", "get_session"),
}
METHODS = {  # of paths, files and torch, whatever they are called on
    *("read_text", "read_bytes", "write_text", "write_bytes", "unlink", "mkdir", "rmdir", "rename", "touch", "open"),
    *("iterdir", "glob", "rglob", "symlink_to", "hardlink_to", "chmod", "rmtree", "system", "popen", "spawn", "fork"),
    *("connect", "urlopen", "load_state_dict_from_url", "from_file", "tofile", "fromfile", "getsource", "settrace"),
    *("model_info", "list_repo_files", "create_repo", "create_branch", "create_commit", "upload_folder"),
}
TORCH = {"load", "save", "hub", "jit", "package", "classes", "ops", "multiprocessing", "distributed", "cpp_extension"}
PLAIN_OS = {"environ", "fspath", "path", "PathLike"}

# Who may do what, and why. All of it is asked for by whoever calls from_pretrained, save_… or push_to_hub.
ALLOWED = {
    ("checkpoint_files.py", "read_json", "read_text"): "config.json and a weights' index of the checkpoint",
    ("checkpoint_files.py", "find_weights.fetch", "cached_file"): "weights of the repository that is loaded",
    ("checkpoint_files.py", "_opened", "safe_open"): "safetensors: numbers, no code",
    ("int8_logits.py", "Int8Logits.__init__", "torch.ops"): "torch's own int8 products",
    ("int8_logits.py", "Int8Logits.__call__", "torch.ops"): "torch's own int8 products",
    ("layouts.py", "read_checkpoint", "snapshot_download"): "from_dflash: JSON and safetensors of a repository",
    ("layouts.py", "write_checkpoint", "write_text"): "save_dflash, save_serving: config.json",
    ("layouts.py", "write_checkpoint", "save_file"): "save_dflash, save_serving: weights",
    ("modeling_lilicorr.py", "LiLiCorrModel.push_to_hub", "tempfile.TemporaryDirectory"): "what is to be uploaded",
    ("repository.py", "staged", "tempfile.TemporaryDirectory"): "save_pretrained writes there first",
    ("repository.py", "staged", "mkdir"): "the folder to save to",
    ("repository.py", "staged", "rglob"): "lists what was written",
    ("repository.py", "staged", "os.replace"): "moves it into place",
    ("repository.py", "staged", "iterdir"): "looks for weights of an earlier save",
    ("repository.py", "staged", "unlink"): "removes weights of an earlier save, by their names only",
    ("repository.py", "release", "importlib.import_module"): "inside the installed package only",
    ("repository.py", "flat_code", "importlib.import_module"): "inside the installed package only",
    ("repository.py", "flat_code", "glob"): "the code files beside it, to pass them on",
    ("repository.py", "flat_code", "read_text"): "the code files beside it, to pass them on",
    ("repository.py", "save_repository", "write_text"): "save_pretrained: code and card",
    ("repository.py", "save_repository", "mkdir"): "save_pretrained: custom_generate/",
    ("repository.py", "save_repository", "getsource"): "save_pretrained: custom_generate/generate.py",
    ("repository.py", "keeps_card", "read_text"): "whether somebody wrote the card that is there",
    ("repository.py", "look_at", "HfApi"): "push_to_hub: the type of its argument",
    ("repository.py", "look_at", "model_info"): "push_to_hub: whether the repository is there, and private",
    ("repository.py", "look_at", "list_repo_files"): "push_to_hub: what it holds",
    ("repository.py", "look_at.text", "tempfile.TemporaryDirectory"): "push_to_hub: for its config.json and card",
    ("repository.py", "look_at.text", "hf_hub_download"): "push_to_hub: its config.json and card",
    ("repository.py", "look_at.text", "read_text"): "push_to_hub: its config.json and card",
    ("repository.py", "upload", "HfApi"): "push_to_hub",
    ("repository.py", "upload", "create_repo"): "push_to_hub",
    ("repository.py", "upload", "create_branch"): "push_to_hub",
    ("repository.py", "upload", "create_commit"): "push_to_hub",
    ("repository.py", "upload", "CommitOperationAdd"): "push_to_hub: the files that were saved",
    ("repository.py", "upload", "CommitOperationDelete"): "push_to_hub: weights that would be loaded instead",
    ("repository.py", "files_of", "rglob"): "push_to_hub: the files that were saved",
}


def powers(name: str, text: str) -> set[tuple[str, str, str]]:
    """(file, function, what it uses) for all that reaches beyond arithmetic."""
    found = set()

    def visit(node: ast.AST, place: tuple[str, ...]) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            place = (*place, node.name)
        for what in used(node):
            found.add((name, ".".join(place), what))
        for child in ast.iter_child_nodes(node):
            visit(child, place)

    visit(ast.parse(text), ())
    return found


def used(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names if strange(alias.name) or (alias.asname and watched(alias.name))]
    if isinstance(node, ast.ImportFrom) and not node.level:
        module = node.module or ""
        if module == "pathlib":
            return []
        if watched(module):
            return [f"{module}.{alias.name}" for alias in node.names]
        renamed = [alias.name for alias in node.names if alias.asname and alias.name in OUTSIDE]
        return [module] if strange(module) else renamed
    if isinstance(node, ast.Name) and node.id in BUILTINS | OUTSIDE and isinstance(node.ctx, ast.Load):
        return [node.id]
    if isinstance(node, ast.Attribute):
        owner = node.value.id if isinstance(node.value, ast.Name) else ""
        if owner == "os":
            return [] if node.attr in PLAIN_OS else [f"os.{node.attr}"]
        if owner in WATCHED:
            return [f"{owner}.{node.attr}"]
        if owner == "torch" and node.attr in TORCH:
            return [f"torch.{node.attr}"]
        if node.attr in METHODS or node.attr in OUTSIDE or node.attr in BUILTINS - {"compile", "exit"}:
            return [node.attr]
    return []


def watched(module: str) -> bool:
    return module.split(".")[0] in WATCHED


def strange(module: str) -> bool:
    """Whether a module of the standard library is not known to be harmless."""
    return module.split(".")[0] in sys.stdlib_module_names and module not in HARMLESS and not watched(module)


def test_the_code_that_travels_does_no_more_than_is_told_here():
    found = set().union(*(powers(name, text) for name, text in released_code().items()))
    assert found - ALLOWED.keys() == set(), "new powers: say who needs them and why, or do without"
    assert ALLOWED.keys() - found == set(), "no longer needed"


@pytest.mark.parametrize(
    "line",
    [
        *("eval('1')", "exec('1')", "compile('1', '', 'exec')", "__import__('os')", "open('x')", "f = open"),
        *(
            "import socket",
            "import subprocess",
            "import pickle",
            "from multiprocessing import Process",
            "import ctypes",
        ),
        *("import urllib.request", "from os import system", "import os as o", "os.system('x')", "os.remove('x')"),
        *("torch.load('x')", "torch.hub.load('x')", "Path('x').write_text('')", "x.unlink()", "import shutil"),
        *("importlib.import_module('x')", "from importlib import import_module", "hf_hub_download('a', 'b')"),
        *("getattr(__builtins__, 'ev' + 'al')", "import builtins", "from huggingface_hub import HfApi as harmless"),
        "torch.ops.load_library('x')",
    ],
)
def test_each_power_is_seen(line):
    assert powers("file.py", f"def f():\n    {line}\n")
