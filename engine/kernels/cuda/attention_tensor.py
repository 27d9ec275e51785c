"""Paged attention for 2-byte elements on tensor cores: online softmax over pages of 16 tokens.

A block answers one tile (see `tiles`) of up to 16 · row_warps query rows, so all heads of a group, and all
sequences of a shared prefix, share one read of K and V. `page_warps` warps divide its pages among them and
are merged at the end. Each page is loaded while the one before it is computed.
"""

from typing import Any, NamedTuple

import numpy as np
from numba.cuda import types

from engine.kernels.cuda import tiles as t
from engine.kernels.cuda.fragments import fragments
from engine.kernels.cuda.parameters import Element, Elements, Float, Float32s, Int, Int32s, Int64s, Kernel
from engine.kernels.cuda.reductions import ALL_LANES, WARP

ROWS = 16


def blocks_per_multiprocessor(head_dim: int, *_: int) -> int:
    """Of decode or append blocks: as many as registers allow; they hide each other's latency."""
    return 3 if head_dim <= 64 else 2


class _Softmax(NamedTuple):
    soften: Any
    merge_warps: Any


def _softmax(cuda: Any, primitives: Any, head_dim: int, page_warps: int) -> _Softmax:
    """Of rows g and g + 8: top is their highest score so far, total the sum of their weights."""
    num_sums = head_dim // 2
    num_stats, num_shared = page_warps * ROWS * 2, num_sums * WARP

    @cuda.jit(device=True, inline="always")
    def soften(scores: Any, top: Any, total: Any, shrink: Any) -> None:
        """Scores become weights exp2(score - top); `shrink` is what older sums are to be multiplied by."""
        for r in range(2):
            highest = top[r]
            for n in range(2):
                highest = max(highest, max(scores[n * 4 + r * 2], scores[n * 4 + r * 2 + 1]))
            highest = max(highest, cuda.shfl_xor_sync(ALL_LANES, highest, 1))
            highest = max(highest, cuda.shfl_xor_sync(ALL_LANES, highest, 2))
            shrink[r] = primitives.exp2(top[r] - highest)
            top[r] = highest
            total[r] *= shrink[r]
            for n in range(2):
                i = n * 4 + r * 2
                scores[i] = primitives.exp2(scores[i] - highest)
                scores[i + 1] = primitives.exp2(scores[i + 1] - highest)
                total[r] += scores[i] + scores[i + 1]

    @cuda.jit(device=True, inline="always")
    def merge_warps(sums: Any, top: Any, total: Any, lane: Any, warp: Any) -> None:
        """The last warp ends up with the sums, tops and totals of all."""
        stats = cuda.shared.array(num_stats, types.float32)
        shared = cuda.shared.array(num_shared, types.float32)
        if lane % 4 == 0:
            for r in range(2):
                stats[warp * ROWS * 2 + lane // 4 + r * 8] = top[r]
                stats[warp * ROWS * 2 + lane // 4 + r * 8 + ROWS] = total[r]
        cuda.syncthreads()
        for r in range(2):
            row = lane // 4 + r * 8
            highest = top[r]
            for other in range(page_warps):
                highest = max(highest, stats[other * ROWS * 2 + row])
            total[r] = np.float32(0.0)
            for other in range(page_warps):
                at = other * ROWS * 2 + row
                total[r] += stats[at + ROWS] * primitives.exp2(stats[at] - highest)
            scale = primitives.exp2(top[r] - highest)
            top[r] = highest
            for i in range(num_sums // 4):
                sums[i * 4 + r * 2] *= scale
                sums[i * 4 + r * 2 + 1] *= scale
        for turn in range(page_warps):
            if warp == turn:
                for i in range(num_sums):
                    if turn > 0:
                        sums[i] += shared[i * WARP + lane]
                    shared[i * WARP + lane] = sums[i]
            cuda.syncthreads()

    return _Softmax(soften, merge_warps)


def attention_tensor(
    cuda: Any,
    primitives: Any,
    element: Element,
    head_dim: int,
    group: int,
    row_warps: int,
    page_warps: int,
) -> Kernel:
    """Block (32, row_warps · page_warps), grid (tiles, Hkv, splits); row_warps or page_warps is 1."""
    load_queries, load_keys, load_values, score, add_values, write_row = fragments(
        cuda, primitives, element, head_dim
    )
    soften, merge_warps = _softmax(cuda, primitives, head_dim, page_warps)
    sees = t.sight(cuda)
    num_sums, num_words, page_size = head_dim // 2, head_dim // 4, t.PAGE * head_dim

    @cuda.jit(device=True, inline="always")
    def hide(scores: Any, page: Any, c: Any, query: Any, visible: Any, ancestors: Any) -> None:
        for r in range(2):
            for n in range(2):
                for x in range(2):
                    token = page * t.PAGE + n * 8 + c * 2 + x
                    if not sees(token, visible[query[r]], ancestors[query[r]]):
                        scores[n * 4 + r * 2 + x] = t.MASKED

    @cuda.jit(device=True, inline="always")
    def write_partial(
        partial: Any, stats: Any, at: Any, sums: Any, top: Any, total: Any, r: Any, c: Any
    ) -> None:
        if c == 0:
            stats[at * 2], stats[at * 2 + 1] = top[r], total[r]
        if total[r] > 0:
            for part in range(head_dim // 32):
                for j in range(4):
                    d, i = part * 32 + c * 8 + j, part * 16 + j * 4 + r * 2
                    partial[at * head_dim + d] = sums[i]
                    partial[at * head_dim + d + 4] = sums[i + 1]

    @cuda.jit(device=True, inline="always")
    def find_rows(
        tiles: Any,
        tile: Any,
        first_row: Any,
        num_rows: Any,
        query_ids: Any,
        g: Any,
        query: Any,
        head: Any,
    ) -> None:
        """Query and head of the lane's two rows."""
        for r in range(2):
            # Rows past the end repeat the last one; they are computed, but not written.
            row = first_row + min(g + r * 8, num_rows - 1)
            query[r] = query_ids[tiles[tile + t.FIRST_QUERY] + row // group]
            head[r] = cuda.blockIdx.y * group + row % group

    @cuda.jit(device=True, inline="always")
    def seen_range(query: Any, visible: Any, ancestors: Any) -> Any:
        """All rows of the warp see the tokens before the first, none those from the second on."""
        all_see, end_seen = 1 << 30, 0
        for r in range(2):
            limit = visible[query[r]]
            all_see = min(all_see, limit)
            end_seen = max(end_seen, limit + (t.TREE_TOKENS if ancestors[query[r]] != 0 else 0))
        for step in (4, 8, 16):
            all_see = min(all_see, cuda.shfl_xor_sync(ALL_LANES, all_see, step))
            end_seen = max(end_seen, cuda.shfl_xor_sync(ALL_LANES, end_seen, step))
        return all_see, end_seen

    def paged_attention(
        q: Elements,
        k_cache: Elements,
        v_cache: Elements,
        out: Elements,
        partial: Float32s,
        stats: Float32s,
        tiles: Int32s,
        query_ids: Int32s,
        tables: Int32s,
        visible: Int32s,
        ancestors: Int64s,
        partial_rows: Int32s,
        table_width: Int,
        num_partial_rows: Int,
        scale: Float,
    ) -> None:
        lane, warp = cuda.threadIdx.x, cuda.threadIdx.y
        g, c = lane // 4, lane % 4
        tile = cuda.blockIdx.x * t.TILE_FIELDS
        num_heads = cuda.gridDim.y * group
        first_row = tiles[tile + t.FIRST_ROW] + warp // page_warps * ROWS
        num_rows = tiles[tile + t.END_ROW] - first_row
        if num_rows <= 0:
            return
        query, head = cuda.local.array(2, types.int32), cuda.local.array(2, types.int32)
        find_rows(tiles, tile, first_row, num_rows, query_ids, g, query, head)
        queries, keys = cuda.local.array(num_words, types.uint32), cuda.local.array(num_words, types.uint32)
        values = cuda.local.array(num_words, types.uint32)
        for r in range(2):
            load_queries(queries, q, (query[r] * num_heads + head[r]) * head_dim, r, c)
        sums, scores = cuda.local.array(num_sums, types.float32), cuda.local.array(8, types.float32)
        top, total = cuda.local.array(2, types.float32), cuda.local.array(2, types.float32)
        shrink = cuda.local.array(2, types.float32)
        for i in range(num_sums):
            sums[i] = np.float32(0.0)
        for r in range(2):
            top[r], total[r] = t.LOWEST, np.float32(0.0)

        all_see, end_seen = seen_range(query, visible, ancestors)
        split_pages = tiles[tile + t.SPLIT_PAGES]
        page = tiles[tile + t.FIRST_PAGE] + cuda.blockIdx.z * split_pages
        end = min(page + split_pages, tiles[tile + t.END_PAGE], (end_seen + t.PAGE - 1) // t.PAGE)
        page += warp % page_warps
        table = tiles[tile + t.TABLE] * table_width
        following = 0  # the block after the one being loaded
        if page < end:
            start = (tables[table + page] * cuda.gridDim.y + cuda.blockIdx.y) * page_size
            load_keys(keys, k_cache, start, g, c)
            load_values(values, v_cache, start, g, c)
        if page + page_warps < end:
            following = tables[table + page + page_warps]
        while page < end:
            score(scores, queries, keys, scale)
            start = (following * cuda.gridDim.y + cuda.blockIdx.y) * page_size
            if page + page_warps < end:
                load_keys(keys, k_cache, start, g, c)
            if page + 2 * page_warps < end:
                following = tables[table + page + 2 * page_warps]
            if (page + 1) * t.PAGE > all_see:
                hide(scores, page, c, query, visible, ancestors)
            soften(scores, top, total, shrink)
            add_values(sums, shrink, scores, values)
            page += page_warps
            if page < end:
                load_values(values, v_cache, start, g, c)

        for r in range(2):
            total[r] += cuda.shfl_xor_sync(ALL_LANES, total[r], 1)
            total[r] += cuda.shfl_xor_sync(ALL_LANES, total[r], 2)
        if page_warps > 1:
            merge_warps(sums, top, total, lane, warp)
            if warp < page_warps - 1:
                return
        split = tiles[tile + t.FIRST_SPLIT] + cuda.blockIdx.z
        for r in range(2):
            if g + r * 8 < num_rows:
                if tiles[tile + t.IS_PARTIAL]:
                    at = (split * num_partial_rows + partial_rows[query[r]]) * num_heads + head[r]
                    write_partial(partial, stats, at, sums, top, total, r, c)
                else:
                    start = (query[r] * num_heads + head[r]) * head_dim
                    write_row(out, start, sums, r, c, np.float32(1.0) / total[r])

    return paged_attention
