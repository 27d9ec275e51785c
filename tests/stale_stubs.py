"""Exits 1 when the committed stubs differ from what the protos generate."""

import filecmp
import sys
import tempfile
from pathlib import Path

from protos.generate import STUBS, generate


def stale_stubs() -> list[str]:
    """Names of the stub files that `make protos` would change, add or remove."""
    with tempfile.TemporaryDirectory() as made:
        generate(Path(made))
        fresh = Path(made) / "nexuskv" / "v1"
        names = {p.name for p in fresh.iterdir()} | {p.name for p in STUBS.glob("*_pb2*")}
        return sorted(
            name
            for name in names
            if not (fresh / name).exists()
            or not (STUBS / name).exists()
            or not filecmp.cmp(fresh / name, STUBS / name, shallow=False)
        )


if __name__ == "__main__":
    stale = stale_stubs()
    if stale:
        print(f"stale stubs, run `make protos`: {', '.join(stale)}", file=sys.stderr)
    sys.exit(1 if stale else 0)
