"""The KV cache as pages [num_blocks, Hkv, 16, D]: writing, gathering, copying, compacting."""

from typing import Any

from engine.kernels.cuda.parameters import Element, Elements, Int, Int32s, Kernel, Long, Words

PAGE = 16


def write_kv(cuda: Any, primitives: Any, element: Element) -> Kernel:
    """One block a row: k, v [T, Hkv, D] to their slots; slot -1 is padding."""

    def write_kv(
        k: Elements,
        v: Elements,
        slots: Int32s,
        k_cache: Elements,
        v_cache: Elements,
        num_heads: Int,
        head_dim: Int,
    ) -> None:
        row = cuda.blockIdx.x
        slot = slots[row]
        if slot < 0:
            return
        for i in range(cuda.threadIdx.x, num_heads * head_dim, cuda.blockDim.x):
            head, d = i // head_dim, i % head_dim
            target = ((slot // PAGE * num_heads + head) * PAGE + slot % PAGE) * head_dim + d
            k_cache[target] = k[row * num_heads * head_dim + i]
            v_cache[target] = v[row * num_heads * head_dim + i]

    return write_kv


def gather_blocks(cuda: Any, primitives: Any, element: Element) -> Kernel:
    """Grid (n, Hkv): out [Hkv, n · 16, D] = the n pages of a sequence.

    page_words: words of one head's part of a page.
    """

    def gather_blocks(cache: Words, blocks: Int32s, out: Words, page_words: Int) -> None:
        index, head = cuda.blockIdx.x, cuda.blockIdx.y
        source = (blocks[index] * cuda.gridDim.y + head) * page_words
        target = (head * cuda.gridDim.x + index) * page_words
        for i in range(cuda.threadIdx.x * 4, page_words, cuda.blockDim.x * 4):
            w0, w1, w2, w3 = primitives.load4(cache, source + i)
            primitives.store4(out, target + i, w0, w1, w2, w3)

    return gather_blocks


def copy_blocks(cuda: Any, primitives: Any, element: Element) -> Kernel:
    """Grid (pairs, layers, 2): block src[i] to dst[i], in keys and in values.

    `layer_words` lie between two layers of a cache. No block is both a source and a target.
    """

    @cuda.jit(device=True, inline="always")
    def copy(cache: Any, source: Any, target: Any, block_words: Any) -> None:
        for i in range(cuda.threadIdx.x * 4, block_words, cuda.blockDim.x * 4):
            w0, w1, w2, w3 = primitives.load4(cache, source + i)
            primitives.store4(cache, target + i, w0, w1, w2, w3)

    def copy_blocks(
        k_cache: Words, v_cache: Words, src: Int32s, dst: Int32s, block_words: Int, layer_words: Long
    ) -> None:
        layer = cuda.blockIdx.y * layer_words
        source = layer + src[cuda.blockIdx.x] * block_words
        target = layer + dst[cuda.blockIdx.x] * block_words
        if cuda.blockIdx.z == 0:
            copy(k_cache, source, target, block_words)
        else:
            copy(v_cache, source, target, block_words)

    return copy_blocks


def compact_kv(cuda: Any, primitives: Any, element: Element) -> Kernel:
    """Grid (S, layers, 2): moves slots src[i] to dst[i] for i in cu_moves[s]..cu_moves[s + 1], in order.

    Every thread carries its own word of the slots through all moves, so a slot may be a target after it has
    been a source.
    """

    @cuda.jit(device=True, inline="always")
    def address(slot: Any, head: Any, num_heads: Any, head_words: Any) -> Any:
        return ((slot // PAGE * num_heads + head) * PAGE + slot % PAGE) * head_words

    def compact_kv(
        k_cache: Words,
        v_cache: Words,
        src: Int32s,
        dst: Int32s,
        cu_moves: Int32s,
        num_heads: Int,
        head_words: Int,
        layer_words: Long,
    ) -> None:
        layer = cuda.blockIdx.y * layer_words
        for i in range(cuda.threadIdx.x, num_heads * head_words, cuda.blockDim.x):
            head, word = i // head_words, i % head_words
            for move in range(cu_moves[cuda.blockIdx.x], cu_moves[cuda.blockIdx.x + 1]):
                source = layer + address(src[move], head, num_heads, head_words) + word
                target = layer + address(dst[move], head, num_heads, head_words) + word
                if cuda.blockIdx.z == 0:
                    k_cache[target] = k_cache[source]
                else:
                    v_cache[target] = v_cache[source]

    return compact_kv
