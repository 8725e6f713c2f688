"""The model card of a published drafter. It travels with each checkpoint, so torch, transformers and the Hub's library
are all it may need.
"""

import json
from collections.abc import Iterable, Sequence
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from ..modeling_lilicorr.repository_files import CARD_MARK

TAGS = ("speculative-decoding", "lilicorr", "dflash", "drafter")
LICENSE = "apache-2.0"

INTRODUCTION = """\
# A drafter for speculative decoding: {title}

It proposes {slots} tokens at a time for {target}, which checks them all in one pass: same tokens as plain
`generate` at temperature 0, same distribution when sampling. It borrows the target's embedding and LM
head and is of no use alone.
"""

USAGE = """\
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
of the commit you read: it pins weights and code together. `code_revision="<commit>"` beside another `revision` pins the
code alone. With `lilicorr` imported it loads without remote code, and `lilicorr verify {repo_id}` says whether the code
here is that of the installed release{release}.
"""

HEAD_USAGE = """\
This repository holds the head alone, trained on the frozen backbone
[{backbone}](https://hf.co/{backbone}), from where the rest comes:

```python
from lilicorr import LiLiCorrModel
from transformers import AutoModelForCausalLM, AutoTokenizer

target_name = "{target_name}"
tokenizer = AutoTokenizer.from_pretrained(target_name)
target = AutoModelForCausalLM.from_pretrained(target_name)
drafter = LiLiCorrModel.from_dflash("{backbone}",{revision} head="{repo_id}", head_revision="<commit>")

inputs = tokenizer("The capital of France is", return_tensors="pt")
print(tokenizer.decode(target.generate(**inputs, assistant_model=drafter)[0]))
```

`drafter.save_pretrained(...)` writes both together as a drafter for `AutoModel.from_pretrained`. Another backbone than
the one it was trained on is refused.
"""

LIMITS = """\
## Limits

- It fits this target alone, and proposes only: whatever it drafts, the output is the target's.
- In bf16 and fp16 a pass over several rows rounds otherwise than one over a single row, so where the target is
  undecided between two tokens, either may be said.
- How much it saves depends on how predictable the text is, and on the machine. Text unlike that which it learned from
  is drafted worse.
"""


def model_card(
    config: Any,
    repo_id: str | None = None,
    tags: Iterable[str] = (),
    *,
    license: str = LICENSE,
    languages: Sequence[str] = (),
    datasets: Sequence[str] = (),
    results: Sequence[EvalResult] = (),
    release: str | None = None,
) -> str:
    """README.md with metadata for the drafter of a `LiLiCorrConfig`.

    Args:
        config: the drafter's configuration; `target_model` names the model it drafts for, if known, and
            `frozen_backbone` the DFlash checkpoint that a head alone belongs to.
        repo_id: name on the Hub, if known.
        tags: further tags for the metadata.
        license, languages, datasets: for the metadata: a licence's identifier, ISO 639 codes, names on the Hub.
        results: what was measured, as evaluation metadata and as a table.
        release: of `lilicorr`, from which the code comes.
    """
    backbone = getattr(config, "frozen_backbone", None) or {}
    based_on = [name for name in (config.target_model, backbone.get("name")) if name]
    data = ModelCardData(
        base_model=based_on[0] if len(based_on) == 1 else based_on or None,
        base_model_relation="adapter" if based_on else None,
        library_name="transformers",
        license=license,
        language=list(languages) or None,
        datasets=list(datasets) or None,
        pipeline_tag="text-generation",
        tags=list(dict.fromkeys((*TAGS, *tags))),
        model_name=(repo_id or "drafter").rpartition("/")[2] if results else None,
        eval_results=list(results) or None,
    )
    names = {
        "target_name": config.target_model or "<the target>",
        "repo_id": repo_id or "<this repository>",
        "release": f" ({release})" if release else "",
        "backbone": backbone.get("name"),
        "revision": f' revision="{backbone["revision"]}",' if backbone.get("revision") else "",
    }
    parts = [
        INTRODUCTION.format(
            title={"none": "DFlash"}.get(config.head_type, f"DFlash with the head `{config.head_type}`"),
            slots=config.num_slots,
            target=f"[{config.target_model}](https://hf.co/{config.target_model})"
            if config.target_model
            else "its target",
        ),
        (HEAD_USAGE if backbone else USAGE).format(**names),
        "| | |\n|---|---|\n" + "\n".join(f"| {name} | {value} |" for name, value in _rows(config).items()) + "\n",
        *([_results_table(results)] if results else []),
        LIMITS,
        CARD_MARK + "\n",
    ]
    return f"---\n{data.to_yaml()}\n---\n\n" + "\n".join(parts)


def _rows(config: Any) -> dict[str, Any]:
    return {
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


def _results_table(results: Sequence[EvalResult]) -> str:
    """What was measured, a row a set of prompts and its settings, a column a metric."""
    metrics = list(dict.fromkeys(result.metric_name or result.metric_type for result in results))
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for result in results:
        settings = ", ".join(f"{key} {value}" for key, value in (result.dataset_args or {}).items())
        row = rows.setdefault((result.dataset_name, settings), {})
        row[result.metric_name or result.metric_type] = result.metric_value
    lines = [
        "## Results",
        "",
        f"| prompts | settings | {' | '.join(metrics)} |",
        "|---|---|" + "---:|" * len(metrics),
        *(
            f"| {name} | {settings} | {' | '.join(str(row.get(metric, '')) for metric in metrics)} |"
            for (name, settings), row in rows.items()
        ),
    ]
    return "\n".join(lines) + "\n"
