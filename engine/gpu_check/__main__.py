"""Checks the kernels on this machine's GPU: parity, speed, whole models. Exit status 1: parity failed."""

import argparse
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

import torch

from engine.errors import DeviceError
from engine.gpu_check import end_to_end, parity, serving, speed
from engine.gpu_check.report import Measurement, table, write_json
from engine.kernels.cuda.kernels import CudaKernels
from engine.kernels.cuda.launcher import GpuLauncher


def main() -> int:
    parser = argparse.ArgumentParser(prog="gpu-check", description=__doc__)
    parser.add_argument("--json", type=Path, default=Path("gpu_check.json"), help="where the figures go")
    parser.add_argument("--only", choices=["parity", "speed", "model", "serve"], help="a part of the check")
    arguments = parser.parse_args()
    device = torch.device("cuda", 0)
    try:
        launcher = GpuLauncher(device)
    except DeviceError as error:
        print(f"gpu-check: {error}", file=sys.stderr)
        return 2

    @cache
    def kernels(head_dim: int) -> CudaKernels:
        return CudaKernels(launcher, launcher.tuning(head_dim))

    started = time.perf_counter()
    machine = _machine(device)
    print(" ".join(f"{key}={value}" for key, value in machine.items()))
    measurements: list[Measurement] = []
    for name, part in (("parity", parity), ("speed", speed), ("model", end_to_end), ("serve", serving)):
        if arguments.only not in (None, name):
            continue
        if name == "parity":
            launcher.prepare(parity.specs(kernels))
            _say("kernels compiled", started)
        measurements += part.measure(kernels, device)
        torch.cuda.empty_cache()
        _say(f"{name} done", started)
    print(table(measurements))
    write_json(arguments.json, machine, measurements)
    return 0 if all(m.met for m in measurements if "parity" in m.name) else 1


def _machine(device: torch.device) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(device)
    return {
        "gpu": properties.name.replace(" ", "_"),
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_gib": round(properties.total_memory / 2**30),
        "torch": torch.__version__,
        "python": sys.version.split()[0],
    }


def _say(what: str, started: float) -> None:
    print(f"[{time.perf_counter() - started:.0f} s] {what}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
