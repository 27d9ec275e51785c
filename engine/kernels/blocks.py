# mypy: allow-untyped-defs, allow-untyped-calls
"""Blocks and slots of the KV cache: copy-on-write, gathering pages, moving accepted drafts."""

from engine.kernels.jit import device, kernel
from engine.kernels.simd import Cache, Float32, Int32, float_bits
from engine.kernels.vector_function import load_float


@device
def _copy_block(cache, layer, source, target):
    _, _, num_heads, page, dim = cache.shape
    for head in range(num_heads):
        for slot in range(page):
            for index in range(dim):
                cache[layer, target, head, slot, index] = cache[layer, source, head, slot, index]


@kernel
def _copy_blocks(k_cache, v_cache, src, dst):
    for layer in range(k_cache.shape[0]):
        for index in range(src.shape[0]):
            _copy_block(k_cache, layer, src[index], dst[index])
            _copy_block(v_cache, layer, src[index], dst[index])


@kernel
def _gather_blocks(cache, blocks, out):
    _, num_heads, page, dim = cache.shape
    for index in range(blocks.shape[0]):
        for head in range(num_heads):
            start = (blocks[index] * num_heads + head) * page * dim
            for slot in range(page):
                for d in range(dim):
                    out[head, index * page + slot, d] = load_float(cache, start + slot * dim + d)


@kernel
def _compact_kv(k_cache, v_cache, src, dst):
    num_layers, _, num_heads, page, dim = k_cache.shape
    for layer in range(num_layers):
        for move in range(src.shape[0]):
            block, slot = src[move] // page, src[move] % page
            to_block, to_slot = dst[move] // page, dst[move] % page
            for head in range(num_heads):
                for d in range(dim):
                    k_cache[layer, to_block, head, to_slot, d] = k_cache[layer, block, head, slot, d]
                    v_cache[layer, to_block, head, to_slot, d] = v_cache[layer, block, head, slot, d]


def copy_blocks(k_cache: Cache, v_cache: Cache, src: Int32, dst: Int32) -> None:
    """Copies blocks src [n] to dst [n] in all layers of both caches [L, B, Hkv, 16, D], in order."""
    _copy_blocks(float_bits(k_cache), float_bits(v_cache), src, dst)


def gather_blocks(cache: Cache, blocks: Int32, out: Float32) -> None:
    """out [Hkv, n * 16, D] = blocks [n] of a cache [B, Hkv, 16, D], widened."""
    _gather_blocks(float_bits(cache), blocks, out)


def compact_kv(k_cache: Cache, v_cache: Cache, src: Int32, dst: Int32) -> None:
    """Moves slots src [n] to dst [n] in all layers of both caches [L, B, Hkv, 16, D], in order: a slot may be
    a target after it has been a source."""
    _compact_kv(float_bits(k_cache), float_bits(v_cache), src, dst)
