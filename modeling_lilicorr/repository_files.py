"""Names of what a drafter's repository holds, and how to tell one; the standard library only."""

import re
from typing import Any

AUTO_MAP = {"AutoConfig": "configuration_lilicorr.LiLiCorrConfig", "AutoModel": "modeling_lilicorr.LiLiCorrModel"}
CARD = "README.md"
CARD_MARK = "<!-- Written by lilicorr, and anew with every upload: remove this line to keep a card of your own. -->"
BARE = (".gitattributes", ".gitignore", CARD, "LICENSE", "LICENSE.md", "LICENSE.txt")  # no more: nothing is there yet
WEIGHT_FILES = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json")
UPLOADED = ("*.safetensors", "*.json", "*.py", CARD)


def is_drafter(settings: Any) -> bool:
    """Whether what a `config.json` holds describes a drafter, in our layout or in that of DFlash runtimes."""
    return isinstance(settings, dict) and (settings.get("model_type") == "lilicorr" or "dflash_config" in settings)
