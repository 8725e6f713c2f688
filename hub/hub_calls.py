"""Calls of the Hub's library, and what goes wrong with them in one sentence; without torch or transformers."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils import get_session, validate_repo_id


def check_repo_id(repo_id: str) -> None:
    """Raise a `ValueError` of one sentence unless the Hub could have a repository of that name."""
    try:
        validate_repo_id(repo_id)
    except HFValidationError:
        raise ValueError(
            f"{repo_id!r} is no name of a repository, expected owner/name of letters, digits, '-', '_' and '.'."
        ) from None


@contextmanager
def hub_errors(repo_id: str, doing: str) -> Iterator[None]:
    """What can go wrong between here and the Hub, in one sentence. Only calls of the Hub's library belong inside."""
    try:
        yield
    except HfHubHTTPError as error:
        status = error.response.status_code
        hint = (
            "log in with `hf auth login`, or set HF_TOKEN to a token that may write there"
            if status in (401, 403, 404)
            else "try again later"
        )
        raise ValueError(f"The Hub refused {doing} {repo_id} (status {status}); {hint}.") from error
    except (_transport_error(), RuntimeError) as error:  # a blob's upload hides the connection's error in the latter
        reason = " ".join(str(error).split()).rstrip(".")
        raise ValueError(
            f"The connection broke while {doing} {repo_id} ({reason}); give the same command again, which goes on with "
            "what is missing."
        ) from error


def _transport_error() -> type[Exception]:
    """What the HTTP client of the installed huggingface_hub raises where a connection fails."""
    client = next(kind for kind in type(get_session()).__mro__ if kind.__name__ == "Client")
    return sys.modules[client.__module__.partition(".")[0]].TransportError
