"""Names of arms and of the drafters behind them, as options and reports spell them."""

from collections.abc import Iterable

PLAIN = "plain"
TREE, CHAIN, TEXTLESS = "tree", "chain", "tree without text"
SUFFIXES = {TREE: "", CHAIN: ", chain", TEXTLESS: ", without text"}  # of a drafter's name in the name of its arm
PROMPT_LOOKUPS = {"prompt lookup 3": 3, "prompt lookup 10": 10}  # Transformers' prompt_lookup_num_tokens
ARMS = (TREE, CHAIN, TEXTLESS, *PROMPT_LOOKUPS)
ALL = "all"


def named_folders(drafters: Iterable[str]) -> dict[str, str]:
    """`name=folder` texts as a mapping.

    Raises:
        ValueError: for another form, a name that is taken, or the same name twice.
    """
    folders: dict[str, str] = {}
    for text in drafters:
        name, separator, folder = text.partition("=")
        if not separator or not name or not folder or name in (PLAIN, *PROMPT_LOOKUPS) or suffix_of(name):
            taken = ", ".join(map(repr, (PLAIN, *PROMPT_LOOKUPS)))
            raise ValueError(
                f"--drafter takes name=folder, got {text!r}; a name is none of {taken} and ends in none of "
                f"{', '.join(repr(suffix) for suffix in SUFFIXES.values() if suffix)}."
            )
        if name in folders:
            raise ValueError(f"Two drafters share a name, {name!r}; give each --drafter its own.")
        folders[name] = folder
    return folders


def chosen_arms(texts: Iterable[str]) -> tuple[str, ...]:
    """Those of `ARMS` that are named, several in one text with commas between, or `all`; in the order of `ARMS`.

    Raises:
        ValueError: there is no such arm, or none is named.
    """
    names = [name.strip() for text in texts for name in text.split(",")]
    for name in names:
        if name not in (*ARMS, ALL):
            raise ValueError(f"There is no arm {name!r}; --arms takes {', '.join(ARMS)} and {ALL}.")
    return ARMS if ALL in names else tuple(name for name in ARMS if name in names)


def suffix_of(arm: str) -> str:
    """What the name of an arm adds to its drafter's: empty for trees, and for arms without a drafter."""
    return next((suffix for suffix in SUFFIXES.values() if suffix and arm.endswith(suffix)), "")
