"""Names that a request may choose a model by."""

from __future__ import annotations

from collections.abc import Sequence

from ...errors import MAX_MODEL_NAME_CHARS, InvalidRequest

DEFAULT = "default"  # means the first model
TAG = ":latest"  # which Ollama's clients may add to any name


def require_names(names: Sequence[str]) -> None:
    """Raises InvalidRequest for a name that is none, or there twice."""
    for name in names:
        is_fine = name.isprintable() and 0 < len(name) <= MAX_MODEL_NAME_CHARS
        if not is_fine or name.strip() != name or name == DEFAULT or name.endswith(TAG):
            allowed = (
                f"a name of 1 to {MAX_MODEL_NAME_CHARS} printable characters, with no blank at an "
                f"end, not {DEFAULT!r}, and without the tag {TAG!r}"
            )
            raise InvalidRequest.of("model", name, allowed)
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise InvalidRequest.of("model", twice, "a different name for each, as in NAME=MODEL")
