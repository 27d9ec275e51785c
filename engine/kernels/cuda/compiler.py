"""From a kernel's Python source to machine code, with or without a GPU.

numba makes PTX for the oldest architecture served, and NVIDIA's linker assembles it for the one at hand: a
kernel goes through numba once, whatever it runs on. (PTX made for sm_100 and newer leaves small arrays on the
stack that belong in registers.) Machine code is cached beside the sources.
"""

import hashlib
import re
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

from cuda.bindings import nvjitlink
from numba import cuda
from numba.cuda import types

from engine.kernels.cuda import primitives
from engine.kernels.cuda.catalog import CATALOG, KernelSpec
from engine.kernels.cuda.parameters import Element, Pointer, Scalar, parameters, storage

OLDEST = (8, 0)  # the first with bfloat16 on tensor cores
Capability = tuple[int, int]


class Resources(NamedTuple):
    """What one kernel takes, as the assembler reports it."""

    registers: int
    stack_bytes: int
    spill_bytes: int
    shared_bytes: int


class Binary(NamedTuple):
    cubin: bytes
    resources: Resources


def make_ptx(spec: KernelSpec, capability: Capability = OLDEST) -> str:
    """PTX with one entry, named like the spec."""
    entry = CATALOG[spec.name]
    kernel = entry.factory(cuda, primitives, spec.element, *spec.constants)
    signature = types.void(*(_numba_type(p, spec.element) for p in parameters(kernel)))
    ptx, _ = cuda.compile(
        kernel,
        signature,
        device=False,
        abi="numba",
        cc=capability,
        fastmath=entry.fast_math,
        launch_bounds=(entry.max_threads, entry.min_blocks(*spec.constants)),
    )
    mangled = re.findall(r"\.entry\s+([\w$]+)", ptx)
    assert len(mangled) == 1
    return str(ptx.replace(mangled[0], spec.name))


def assemble(ptx: str, capability: Capability) -> Binary:
    major, minor = capability
    link = nvjitlink.create(2, [f"-arch=sm_{major}{minor}", "-verbose"])
    try:
        source = ptx.encode()
        nvjitlink.add_data(link, nvjitlink.InputType.PTX, source, len(source), "kernel")
        nvjitlink.complete(link)
        cubin = bytearray(nvjitlink.get_linked_cubin_size(link))
        nvjitlink.get_linked_cubin(link, cubin)
        log = bytearray(nvjitlink.get_info_log_size(link))
        nvjitlink.get_info_log(link, log)
    finally:
        nvjitlink.destroy(link)
    return Binary(bytes(cubin), _resources(log.decode()))


def cubins(
    specs: Iterable[KernelSpec], capability: Capability, num_processes: int
) -> dict[KernelSpec, bytes]:
    """Machine code of all specs: what is not cached is compiled in parallel."""
    wanted = list(dict.fromkeys(specs))
    found = {spec: _cached(spec, capability) for spec in wanted}
    missing = [spec for spec in wanted if found[spec] is None]
    if len(missing) > 1 and num_processes > 1:
        workers = min(num_processes, len(missing))
        with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
            made = list(pool.map(_build, missing, [capability] * len(missing)))
    else:
        made = [_build(spec, capability) for spec in missing]
    return {spec: code for spec, code in {**found, **dict(zip(missing, made, strict=True))}.items() if code}


def _numba_type(parameter: Pointer | Scalar, element: Element) -> Any:
    if isinstance(parameter, Scalar):
        return getattr(types, parameter.type)
    name = storage(element) if parameter.element == "element" else parameter.element
    return types.CPointer(getattr(types, name))


def _resources(log: str) -> Resources:
    def number(pattern: str) -> int:
        match = re.search(pattern, log)
        return int(match.group(1)) if match else 0

    return Resources(
        registers=number(r"Used (\d+) registers"),
        stack_bytes=number(r"(\d+) bytes stack frame"),
        spill_bytes=number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads"),
        shared_bytes=number(r"(\d+) bytes smem"),
    )


def _build(spec: KernelSpec, capability: Capability) -> bytes:
    code = assemble(make_ptx(spec), capability).cubin
    path = _cache_path(spec, capability)
    with suppress(OSError):  # a read-only installation compiles every time
        path.parent.mkdir(exist_ok=True)
        temporary = path.with_suffix(f".{hashlib.sha256(code).hexdigest()[:8]}")
        temporary.write_bytes(code)
        temporary.replace(path)
    return code


def _cached(spec: KernelSpec, capability: Capability) -> bytes | None:
    path = _cache_path(spec, capability)
    return path.read_bytes() if path.exists() else None


def _cache_path(spec: KernelSpec, capability: Capability) -> Path:
    key = hashlib.sha256(f"{_sources()} {spec} {capability}".encode()).hexdigest()
    return Path(__file__).parent / "__pycache__" / f"{spec.name}-{key[:20]}.cubin"


@cache
def _sources() -> str:
    """Changes whenever a kernel could come out differently."""
    tools = version("numba"), version("numba-cuda"), nvjitlink.version()
    here = Path(__file__).parent
    files = [*sorted(here.glob("*.py")), here.parent / "sampling.py"]
    digest = hashlib.sha256(str(tools).encode())
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()
