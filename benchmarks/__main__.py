"""`make bench`: measures, prints a table and writes bench.json; ONLY=PART runs a part.

PART is one of `PARTS`. Exits 0 when everything was measured, met or not.
"""

import argparse
import json
from pathlib import Path

from benchmarks import end_to_end, exactness, kernels, memory, quality, step_profile
from benchmarks.figures import table

PARTS = {
    "memory": memory.measure,
    "kernels": kernels.measure,
    "exactness": exactness.measure,
    "quality": quality.measure,
    "step": step_profile.measure,
    "e2e": end_to_end.measure,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=PARTS)
    only = parser.parse_args().only
    figures = [f for name, part in PARTS.items() if only in (None, name) for f in part()]
    Path("bench.json").write_text(json.dumps(figures, indent=1) + "\n")
    print(table(figures))


if __name__ == "__main__":
    main()
