"""Indices that are known not to be negative."""

from typing import Any

import numpy as np

from memory_manager.core.jit import inner


@inner
def index(value: int) -> Any:
    """`value` as an unsigned index: for hot loops, where the check for a negative one costs."""
    return np.uint64(value)
