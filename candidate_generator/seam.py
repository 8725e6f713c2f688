"""The one seam to `generate`."""


def install() -> None:
    """Wrap `GenerationMixin._get_candidate_generator` once."""
