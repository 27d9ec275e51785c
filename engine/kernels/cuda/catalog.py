"""The kernels there are, and how each is compiled."""

from collections.abc import Callable
from typing import NamedTuple

from engine.kernels.cuda.activation import silu_mul
from engine.kernels.cuda.attention_float import attention_float
from engine.kernels.cuda.attention_tensor import attention_tensor, blocks_per_multiprocessor
from engine.kernels.cuda.merge_splits import merge_splits
from engine.kernels.cuda.norm import add_rms_norm, rms_norm
from engine.kernels.cuda.pages import compact_kv, copy_blocks, gather_blocks, write_kv
from engine.kernels.cuda.parameters import Element, Kernel
from engine.kernels.cuda.rope import rope_write_kv
from engine.kernels.cuda.sampling import sample_rows
from engine.kernels.cuda.verify import verify_drafts, verify_tree


class KernelSpec(NamedTuple):
    """A kernel to compile: `constants` are the factory's arguments after the element."""

    name: str
    element: Element
    constants: tuple[int, ...] = ()


class Entry(NamedTuple):
    factory: Callable[..., Kernel]  # (cuda, primitives, element, *constants)
    max_threads: int  # of a block; bounds the registers
    fast_math: bool = False  # approximate division and exponentials, no infinities
    min_blocks: Callable[..., int] = lambda *constants: 1  # a multiprocessor must hold; bounds them too


CATALOG = {
    "rms_norm": Entry(rms_norm, 256),
    "add_rms_norm": Entry(add_rms_norm, 256),
    "silu_mul": Entry(silu_mul, 256),
    "rope_write_kv": Entry(rope_write_kv, 256),
    "write_kv": Entry(write_kv, 256),
    "gather_blocks": Entry(gather_blocks, 256),
    "copy_blocks": Entry(copy_blocks, 256),
    "compact_kv": Entry(compact_kv, 256),
    "attention_tensor": Entry(attention_tensor, 128, True, blocks_per_multiprocessor),
    "attention_float": Entry(attention_float, 128, fast_math=True),
    "merge_splits": Entry(merge_splits, 32, fast_math=True),
    "verify_drafts": Entry(verify_drafts, 128),
    "verify_tree": Entry(verify_tree, 128),
    "sample_rows": Entry(sample_rows, 512),
}
