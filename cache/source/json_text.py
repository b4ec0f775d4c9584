"""JSON text → values, where NaN (what pandas writes for a missing value) is null, and any failure a `ValueError`."""

import json
from typing import Any


def decoded(text: str | bytes) -> Any:
    """The value; raises ValueError where the text is not JSON, or is nested too deeply to be read."""
    if isinstance(text, bytes):
        text = text.decode("utf-8", "surrogatepass")
    try:
        return _DECODER.decode(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def is_missing(value: Any) -> bool:
    """Null, or the NaN that stands for it in a column of numbers."""
    return value is None or (isinstance(value, float) and value != value)


def _constant(name: str) -> float | None:
    return None if name == "NaN" else float(name)


_DECODER = json.JSONDecoder(parse_constant=_constant)
