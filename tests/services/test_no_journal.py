"""`--journal off`: no token is kept on disk."""

from pathlib import Path

import numpy as np
import pytest

from tests.services.memory_process import running_memory_manager, serve_requests

SERVED = np.arange(900, 1028, dtype=np.int32)  # one of the prompts


def traces(home: Path) -> list[Path]:
    """Files that hold a few of the prompt's tokens in a row, as they are or in hexadecimal."""
    runs = [SERVED[i : i + 4].tobytes() for i in range(0, SERVED.size, 4)]
    files = [path for path in home.rglob("*") if path.is_file()]
    return [
        path
        for path in files
        if any(r in path.read_bytes() or r.hex().encode() in path.read_bytes() for r in runs)
    ]


@pytest.mark.parametrize("journal", ["off", "auto"])
def test_without_a_journal_no_token_reaches_the_disk(tmp_path: Path, journal: str) -> None:
    """With one they do, where this test looks."""
    home = str(tmp_path)
    places = {"HOME": home, "XDG_STATE_HOME": home, "XDG_CACHE_HOME": home, "TMPDIR": home}
    with running_memory_manager("--journal", journal, **places) as address:
        serve_requests(address)
        assert bool(traces(tmp_path)) == (journal == "auto")
    assert bool(traces(tmp_path)) == (journal == "auto")
