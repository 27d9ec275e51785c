"""The engine's kernels on a CPU: numba and LLVM, sums in float32, the GIL released in every call."""

from engine.kernels.attention import paged_attention, paged_attention_shared
from engine.kernels.blocks import compact_kv, copy_blocks, gather_blocks
from engine.kernels.decoder import DecoderBatch, DecoderShape, DecoderWeights, decoder_step
from engine.kernels.matmul import PackedWeight, matmul, matmul_silu, pack_weight, pair_gate_up
from engine.kernels.quantised import PackedInt8Weight, pack_weight_int4, pack_weight_int8
from engine.kernels.rope import rope_write_kv
from engine.kernels.rows import add_rms_norm, embed_rms_norm
from engine.kernels.simd import Cache, Float32, Int32
from engine.kernels.tree import Tree, causal
from engine.kernels.verify import verify_drafts, verify_tree

__all__ = [
    "Cache",
    "DecoderBatch",
    "DecoderShape",
    "DecoderWeights",
    "Float32",
    "Int32",
    "PackedInt8Weight",
    "PackedWeight",
    "Tree",
    "add_rms_norm",
    "causal",
    "compact_kv",
    "copy_blocks",
    "decoder_step",
    "embed_rms_norm",
    "gather_blocks",
    "matmul",
    "matmul_silu",
    "pack_weight",
    "pack_weight_int4",
    "pack_weight_int8",
    "paged_attention",
    "paged_attention_shared",
    "pair_gate_up",
    "rope_write_kv",
    "verify_drafts",
    "verify_tree",
]
