"""The model card of a published drafter. It travels with each checkpoint, so it needs the standard library only."""

import json
from collections.abc import Iterable
from typing import Any

TAGS = ("speculative-decoding", "lilicorr", "dflash", "drafter")

USAGE = """\
# A drafter for speculative decoding: {title}

It proposes {slots} tokens at a time for {target}, which checks them all in one pass: same tokens as plain
`generate` at temperature 0, same distribution when sampling. It borrows the target's embedding and LM
head and is of no use alone.

```python
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

target_name = "{target_name}"
tokenizer = AutoTokenizer.from_pretrained(target_name)
target = AutoModelForCausalLM.from_pretrained(target_name)
drafter = AutoModel.from_pretrained("{repo_id}", revision="<commit>", trust_remote_code=True)

inputs = tokenizer("The capital of France is", return_tensors="pt")
print(tokenizer.decode(target.generate(**inputs, assistant_model=drafter)[0]))
```

`trust_remote_code=True` runs the Python files of this repository. Read them, then replace `<commit>` by the 40 digits
of the commit you read: it pins weights and code together. With `lilicorr` imported it loads without remote code.

| | |
|---|---|
{table}
"""


def model_card(config: Any, repo_id: str | None = None, tags: Iterable[str] = ()) -> str:
    """README.md with front matter for the drafter of a `LiLiCorrConfig`.

    Args:
        config: the drafter's configuration; `target_model` names the model it drafts for, if known.
        repo_id: name on the Hub, if known.
        tags: further tags for the front matter.
    """
    front = ["---", "library_name: transformers", "license: apache-2.0"]
    if config.target_model:
        front += [f"base_model: {config.target_model}", "base_model_relation: adapter"]
    front += ["pipeline_tag: text-generation", "tags:", *(f"- {tag}" for tag in dict.fromkeys((*TAGS, *tags))), "---"]
    rows = {
        "Block size": config.block_size,
        "Head": config.head_type,
        **{f"Head's {key.replace('_', ' ')}": value for key, value in config.head_config.items()},
        "Draft layers": config.num_hidden_layers,
        "Target's layers read": ", ".join(map(str, config.target_layer_ids)),
        "Target's hidden size, layers, vocabulary": (
            f"{config.hidden_size}, {config.num_target_layers}, {config.vocab_size}"
        ),
        **_data_rows(config.training_data or {}),
    }
    usage = USAGE.format(
        title={"none": "DFlash"}.get(config.head_type, f"DFlash with the head `{config.head_type}`"),
        slots=config.num_slots,
        target=f"[{config.target_model}](https://hf.co/{config.target_model})" if config.target_model else "its target",
        target_name=config.target_model or "<the target>",
        repo_id=repo_id or "<this repository>",
        table="\n".join(f"| {name} | {value} |" for name, value in rows.items()),
    )
    return "\n".join(front) + "\n\n" + usage


def _data_rows(data: dict[str, Any]) -> dict[str, str]:
    """Table rows of a configuration's `training_data`."""
    rows = {}
    if "tokens" in data:
        rows["Learned from"] = f"{data['tokens']:,} tokens of answers in {data.get('sequences', 0):,} sequences"
    if data.get("revision"):
        rows["Revision of that target"] = f"`{data['revision']}`"
    if "template_options" in data:
        options = data["template_options"]
        said = ", ".join(f"`{name}={json.dumps(value)}`" for name, value in options.items())
        rows["Chat template options"] = f"{said}; serve with the same" if said else "the template's defaults"
    if data.get("decoding"):
        temperature = data["decoding"].get("temperature")
        rows["Answers were"] = f"sampled at temperature {temperature}" if temperature else "greedy"
    return rows
