"""What was measured, as a table and as JSON."""

import json
from pathlib import Path
from typing import Any, Literal, NamedTuple


class Measurement(NamedTuple):
    name: str
    value: float
    unit: str
    better: Literal["higher", "lower"]
    target: float | None = None

    @property
    def met(self) -> bool:
        if self.target is None:
            return True
        return self.value >= self.target if self.better == "higher" else self.value <= self.target


def table(measurements: list[Measurement]) -> str:
    width = max(len(m.name) for m in measurements)
    lines = [f"{'':{width}}  {'value':>10}  {'target':>10}"]
    for m in measurements:
        target = "" if m.target is None else f"{'≥' if m.better == 'higher' else '≤'} {m.target:.4g}"
        verdict = "" if m.target is None else ("  met" if m.met else "  NOT MET")
        lines.append(f"{m.name:{width}}  {m.value:>10.4g}  {target:>10}{verdict:9}  {m.unit}".rstrip())
    return "\n".join(lines)


def write_json(path: Path, machine: dict[str, Any], measurements: list[Measurement]) -> None:
    entries = [{**m._asdict(), "met": m.met} for m in measurements]
    path.write_text(json.dumps({"machine": machine, "measurements": entries}, indent=1) + "\n")
