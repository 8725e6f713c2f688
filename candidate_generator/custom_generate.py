"""The decoding loop without the hook, by Transformers' own route: `generate(..., custom_generate="<this repository>")`.

A published drafter carries this file as `custom_generate/generate.py`.
"""

from typing import Any


def generate(model: Any, assistant_model: Any = None, **options: Any) -> Any:
    """`model.generate` with `assistant_model`, a drafter of `model`, by the loop that the drafter brings along.

    Raises:
        ValueError: without a drafter.
    """
    decode = getattr(assistant_model, "decode", None)
    if decode is None:
        raise ValueError(
            "custom_generate needs the drafter too; load it with AutoModel.from_pretrained(<this repository>, "
            "trust_remote_code=True) and pass it as assistant_model."
        )

    def loop(model: Any, input_ids: Any, **call: Any) -> Any:
        return decode(model, input_ids, **call)

    return model.generate(custom_generate=loop, **options)
