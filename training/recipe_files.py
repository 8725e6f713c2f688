"""Recipes by path or name. It imports no torch, so that a mistyped name is answered at once."""

from pathlib import Path

RECIPES = Path(__file__).parent / "recipes"


def find_recipe(name: str | Path) -> Path:
    """`name` if it is a file, else the recipe of that name in this folder's `recipes`, such as `qwen3-8b`.

    Raises:
        ValueError: if there is neither, naming the recipes that there are.
    """
    path = Path(name)
    if path.is_file():
        return path
    known = {str(file.relative_to(RECIPES).with_suffix("")): file for file in sorted(RECIPES.rglob("*.yaml"))}
    bare = path.as_posix().removesuffix(".yaml")
    if bare in known:
        return known[bare]
    stages = [each for each in known if each.startswith(f"{bare}/")]
    if stages:
        raise ValueError(f"The recipe {name} has several stages; give one of {', '.join(stages)}.")
    raise ValueError(f"There is no recipe {name}; give a YAML file or one of {', '.join(known)}.")
