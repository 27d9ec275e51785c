"""Compiled code is kept on disk, and thrown away when any source of the package changes; other vector
widths."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import engine.kernels
from engine.kernels.simd import CPU_FEATURES

KERNELS = Path(engine.kernels.__file__).parent
ROOT = KERNELS.parent.parent

NORM = """
import numpy as np
from engine.kernels import rows
x, out = np.ones((2, 64), np.float32), np.empty((2, 64), np.float32)
rows.add_rms_norm(x, x.copy(), x[0].copy(), 0.0, out)
assert np.allclose(out, 1)
print(sum(rows.add_rms_norm.stats.cache_hits.values()))
"""

# As if the processor had just these features. Vectors of 16 lanes run on any machine: LLVM splits what does
# not fit its registers.
OTHER_PROCESSOR = """
import sys
import llvmlite.binding as llvm
pretended, lanes = sys.argv[1].split(), int(sys.argv[2])
features = llvm.get_host_cpu_features
llvm.get_host_cpu_features = lambda: dict.fromkeys(pretended, True)
import engine.kernels.simd
llvm.get_host_cpu_features = features
assert engine.kernels.simd.LANES == lanes
import pytest
sys.exit(pytest.main(sys.argv[3:]))
"""


def run(code: str, path: Path, cache: Path, *args: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(path), "NUMBA_CACHE_DIR": str(cache)}
    command = [sys.executable, "-c", code, *args]
    result = subprocess.run(command, env=environment, cwd=path, capture_output=True, text=True, timeout=280)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout.strip()


def test_cache(tmp_path: Path) -> None:
    package = tmp_path / "engine" / "kernels"
    shutil.copytree(KERNELS, package, ignore=shutil.ignore_patterns("__pycache__"))
    (package.parent / "__init__.py").touch()
    cache = tmp_path / "cache"
    assert run(NORM, tmp_path, cache) == "0"
    assert run(NORM, tmp_path, cache) == "1"
    with (package / "simd.py").open("a") as source:
        source.write("# changed\n")
    assert run(NORM, tmp_path, cache) == "0"


@pytest.mark.parametrize(
    ("features", "lanes", "only"),
    [
        ("avx512f", 16, "bfloat16 or quantised or (test_shapes and 9-3-96)"),
        ("avx2", 8, "quantised"),
        ("", 8, "quantised"),
    ],
)
def test_other_processors(features: str, lanes: int, only: str, tmp_path: Path) -> None:
    if features == "avx2" and not CPU_FEATURES.get("avx2"):
        pytest.skip("this processor has no AVX2, and the kernels call its instructions by name")
    here = Path(__file__).parent
    tests = [f"{here}/test_cpu_matmul.py", f"{here}/test_cpu_attention.py::test_shapes"]
    options = "-q", "-p", "no:cacheprovider", "-k", only
    run(OTHER_PROCESSOR, ROOT, tmp_path, features, str(lanes), *options, *tests)
