"""JSON as it goes over the wire."""

from __future__ import annotations

import json
from typing import Any


def json_bytes(value: Any) -> bytes:
    """Compact UTF-8. Raises ValueError for NaN and infinities, which JSON has not."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
