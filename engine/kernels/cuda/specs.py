"""Which kernels a model's shape calls for."""

import torch

from engine.kernels.cuda.catalog import KernelSpec
from engine.kernels.cuda.parameters import Element
from engine.kernels.cuda.plan import Tuning

ELEMENTS: dict[torch.dtype, Element] = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}


def rope_spec(element: Element, head_dim: int, normed: bool) -> KernelSpec:
    return KernelSpec("rope_write_kv", element, (head_dim, int(normed)))


def attention_spec(element: Element, head_dim: int, group: int, decodes: bool, tuning: Tuning) -> KernelSpec:
    if element == "float32":
        return KernelSpec("attention_float", element, (head_dim, group, tuning.page_warps))
    warps = (1, tuning.page_warps) if decodes else (tuning.row_warps, 1)
    return KernelSpec("attention_tensor", element, (head_dim, group, *warps))


def decoder_specs(
    element: Element, head_dim: int, group: int, normed: bool, tuning: Tuning
) -> list[KernelSpec]:
    """All that a decoder launches, sampling included."""
    return [
        attention_spec(element, head_dim, group, True, tuning),
        attention_spec(element, head_dim, group, False, tuning),
        KernelSpec("merge_splits", element, (head_dim,)),
        rope_spec(element, head_dim, normed),
        *(KernelSpec(name, element) for name in ("rms_norm", "add_rms_norm", "silu_mul", "gather_blocks")),
        *(KernelSpec(name, element) for name in ("copy_blocks", "compact_kv")),
        *(KernelSpec(name, "float32") for name in ("verify_drafts", "verify_tree", "sample_rows")),
    ]
