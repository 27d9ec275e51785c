"""No request compiles anything."""

import subprocess
import sys

import numpy as np
import pytest

from memory_manager.core import waiting
from memory_manager.core.jit import ArgumentTypesError
from memory_manager.warm_up import warm_up

# In a process of its own: elsewhere other tests have compiled what warming up forgets.
_PROGRAM = """
import importlib, pkgutil
from memory_manager import core
from memory_manager.warm_up import warm_up

warm_up()
for module in pkgutil.iter_modules(core.__path__):
    for value in vars(importlib.import_module(f"memory_manager.core.{module.name}")).values():
        compiles_once = getattr(getattr(value, "compile", None), "__name__", "") == "compile_once"
        if compiles_once and module.name != "drafts":
            assert len(value.signatures) == 1, value
"""


def test_warming_up_compiles_every_kernel() -> None:
    subprocess.run([sys.executable, "-c", _PROGRAM], check=True)


def test_a_kernel_is_not_compiled_for_other_types() -> None:
    warm_up()
    with pytest.raises(ArgumentTypesError):
        waiting.take_woken(np.zeros(3), np.zeros(3, np.int64))
