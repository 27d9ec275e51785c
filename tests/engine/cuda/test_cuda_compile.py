"""Every kernel becomes machine code for every architecture served, without a GPU and without spills."""

import itertools
import re
from functools import cache

import pytest

from engine.kernels.cuda import compiler
from engine.kernels.cuda.catalog import CATALOG, KernelSpec
from engine.kernels.cuda.parameters import Element
from engine.kernels.cuda.plan import Tuning
from engine.kernels.cuda.specs import attention_spec

TARGETS = [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)]
TUNING = Tuning()
ELEMENTS: tuple[Element, ...] = ("float32", "bfloat16", "float16")
REGISTERS = 65_536  # of a multiprocessor, handed out in eights a thread

ptx_of = cache(compiler.make_ptx)
OTHERS: list[KernelSpec] = [
    KernelSpec("rms_norm", "bfloat16"),
    KernelSpec("add_rms_norm", "float16"),
    KernelSpec("silu_mul", "bfloat16"),
    KernelSpec("rope_write_kv", "bfloat16", (128, 1)),
    KernelSpec("rope_write_kv", "float32", (96, 0)),
    KernelSpec("write_kv", "bfloat16"),
    KernelSpec("gather_blocks", "bfloat16"),
    KernelSpec("copy_blocks", "bfloat16"),
    KernelSpec("compact_kv", "bfloat16"),
    KernelSpec("merge_splits", "float16", (128,)),
    KernelSpec("verify_drafts", "float32"),
    KernelSpec("verify_tree", "float32"),
    KernelSpec("sample_rows", "float32"),
]


def attention(element: Element, head_dim: int, group: int, decodes: bool) -> KernelSpec:
    return attention_spec(element, head_dim, group, decodes, TUNING)


def all_specs() -> list[KernelSpec]:
    shapes = itertools.product(ELEMENTS, (64, 96, 128), (1, 3, 4, 8), (True, False))
    specs = [attention(*shape) for shape in shapes]
    specs += [KernelSpec("merge_splits", e, (d,)) for e in ELEMENTS for d in (64, 96, 128)]
    specs += [KernelSpec("rope_write_kv", e, (d, n)) for e in ELEMENTS for d in (64, 96, 128) for n in (0, 1)]
    shaped = {spec.name for spec in specs}
    specs += [KernelSpec(name, e) for name in CATALOG for e in ELEMENTS if name not in shaped]
    return list(dict.fromkeys(specs))


def check_resources(spec: KernelSpec, ptx: str, target: tuple[int, int]) -> None:
    resources = compiler.assemble(ptx, target).resources
    assert resources.spill_bytes == 0, target
    assert resources.stack_bytes == 0, target
    entry = CATALOG[spec.name]
    threads = entry.max_threads * entry.min_blocks(*spec.constants)
    assert -(-resources.registers // 8) * 8 * threads <= REGISTERS, target


@pytest.mark.parametrize(
    "spec",
    [
        attention("bfloat16", 64, 3, True),
        attention("bfloat16", 64, 3, False),
        attention("bfloat16", 128, 4, True),
        attention("float16", 128, 8, False),
        attention("float32", 64, 3, True),
        *OTHERS,
    ],
    ids=lambda spec: "-".join(map(str, (spec.name, spec.element, *spec.constants))),
)
def test_kernels_fit_in_registers_on_every_architecture(spec: KernelSpec) -> None:
    for target in TARGETS:
        check_resources(spec, ptx_of(spec), target)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_kernel_fits_in_registers_on_every_architecture() -> None:
    for spec in all_specs():
        ptx = compiler.make_ptx(spec)
        for target in TARGETS:
            check_resources(spec, ptx, target)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("target", TARGETS)
def test_ptx_can_be_made_for_each_architecture_itself(target: tuple[int, int]) -> None:
    for spec in [attention("bfloat16", 128, 4, True), attention("float32", 128, 4, True), *OTHERS]:
        assert compiler.assemble(compiler.make_ptx(spec, target), target).resources.spill_bytes == 0


def test_two_byte_attention_runs_on_tensor_cores_and_loads_16_bytes_at_once() -> None:
    ptx = ptx_of(attention("bfloat16", 64, 3, True))
    # Two products of 8 tokens and one for each 8 dimensions, over 16 at a time.
    assert ptx.count("mma.sync.aligned.m16n8k16") == 2 * 64 // 16 + 64 // 8
    # Keys of the first page and of the one that follows: two halves of 32 dimensions for two tokens each.
    assert len(re.findall(r"ld\.global\.v4\.u32", ptx)) >= 2 * (2 * 64 // 32)


def test_compiled_kernels_are_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = KernelSpec("silu_mul", "float32")
    first = compiler.cubins([spec], (9, 0), num_processes=1)
    monkeypatch.setattr(compiler, "make_ptx", None)  # nothing is left to compile
    assert compiler.cubins([spec, spec], (9, 0), num_processes=1) == first
    assert first[spec].startswith(b"\x7fELF")
