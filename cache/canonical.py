"""JSON in one spelling, so that equal content has equal bytes."""

import json
from typing import Any


def canonical(content: Any) -> bytes:
    return json.dumps(content, sort_keys=True, ensure_ascii=True, separators=(",", ":")).encode()
