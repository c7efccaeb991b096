"""Row filters: a small safe expression language, compiled to Arrow compute calls."""

from typing import Any

import pyarrow as pa


def parse_expression(text: str, *, columns: pa.Schema, where: str) -> Any:
    """Parse and check ``text`` against ``columns``; ``where`` names the place for error messages."""
    raise NotImplementedError
