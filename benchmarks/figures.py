"""A measured figure beside its target."""

from typing import Any, Literal


def figure(
    name: str, value: float, unit: str, better: Literal["higher", "lower"], target: float | None = None
) -> dict[str, Any]:
    """As it stands in bench.json."""
    if target is None:
        met = None
    else:
        met = value >= target if better == "higher" else value <= target
    return {"name": name, "value": value, "unit": unit, "better": better, "target": target, "met": met}


def table(figures: list[dict[str, Any]]) -> str:
    """As people read it."""
    lines = [f"{'figure':34}{'measured':>14} {'unit':12}{'target':>12}  met"]
    for f in figures:
        target = "" if f["target"] is None else f"{f['target']:,.6g}"
        met = {True: "yes", False: "NO", None: ""}[f["met"]]
        lines.append(f"{f['name']:34}{f['value']:>14,.6g} {f['unit']:12}{target:>12}  {met}")
    return "\n".join(lines)
