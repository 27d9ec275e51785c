"""One float32 system with the default model serves most end-to-end tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.system import System, running_system


@pytest.fixture(scope="session")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    log: Path = tmp_path_factory.mktemp("system") / "log"
    with running_system(log, "--dtype", "float32", "--kv-blocks", "2048") as system:
        yield system


@pytest.fixture
def calm_system(system: System) -> Iterator[System]:
    """The system, which afterwards must be idle, with every block free or cached and nothing violated."""
    yield system
    system.wait_idle()
    assert system.integrity_violations() == []
