"""Names of arms and of the drafters behind them, as options and reports spell them."""

from collections.abc import Iterable

PLAIN = "plain"
WHOLE = ", whole blocks"


def named_folders(drafters: Iterable[str]) -> dict[str, str]:
    """`name=folder` texts as a mapping.

    Raises:
        ValueError: for another form, a name that is taken, or the same name twice.
    """
    folders: dict[str, str] = {}
    for text in drafters:
        name, separator, folder = text.partition("=")
        if not separator or not name or not folder or name == PLAIN or name.endswith(WHOLE):
            raise ValueError(f"--drafter takes name=folder with a name other than {PLAIN!r}, got {text!r}.")
        if name in folders:
            raise ValueError(f"Two drafters share a name, {name!r}; give each --drafter its own.")
        folders[name] = folder
    return folders
