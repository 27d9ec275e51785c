"""Paged attention in float32: online softmax over pages of 16 tokens, without tensor cores.

A block answers one tile (see `tiles`) of up to 8 query rows; its warps divide the pages among them and are
merged at the end. For scores a lane owns a token and half of the dimensions, for values some dimensions of
all tokens.
"""

from typing import Any

import numpy as np
from numba.cuda import types

from engine.kernels.cuda import tiles as t
from engine.kernels.cuda.parameters import Element, Float, Float32s, Int, Int32s, Int64s, Kernel
from engine.kernels.cuda.reductions import ALL_LANES, WARP

ROWS = 8


def attention_float(
    cuda: Any, primitives: Any, element: Element, head_dim: int, group: int, page_warps: int
) -> Kernel:
    """Block (32, page_warps), grid (tiles, Hkv, splits)."""
    sees = t.sight(cuda)
    parts, half_dim, page_size = head_dim // WARP, head_dim // 2, t.PAGE * head_dim
    num_sums, tile_size = ROWS * parts, ROWS * head_dim
    num_stats, num_weights = page_warps * ROWS * 2, page_warps * ROWS * t.PAGE

    @cuda.jit(device=True, inline="always")
    def score(scores: Any, queries: Any, k_cache: Any, start: Any, lane: Any) -> None:
        """scores[r] = q · k of row r and token lane % 16."""
        offset = lane // t.PAGE * half_dim
        for r in range(ROWS):
            scores[r] = np.float32(0.0)
        for d in range(offset, offset + half_dim, 4):
            k0, k1, k2, k3 = primitives.load4_float32(k_cache, start + lane % t.PAGE * head_dim + d)
            for r in range(ROWS):
                at = r * head_dim + d
                scores[r] += (queries[at] * k0 + queries[at + 1] * k1) + (
                    queries[at + 2] * k2 + queries[at + 3] * k3
                )
        for r in range(ROWS):
            scores[r] += cuda.shfl_xor_sync(ALL_LANES, scores[r], t.PAGE)

    @cuda.jit(device=True, inline="always")
    def soften(scores: Any, sums: Any, top: Any, total: Any) -> None:
        """Scores become weights exp2(score - top); sums are shrunk to the new top."""
        for r in range(ROWS):
            highest, weight_sum = scores[r], np.float32(0.0)
            for step in (8, 4, 2, 1):
                highest = max(highest, cuda.shfl_xor_sync(ALL_LANES, highest, step))
            highest = max(highest, top[r])
            shrink = primitives.exp2(top[r] - highest)
            top[r] = highest
            scores[r] = primitives.exp2(scores[r] - highest)
            weight_sum = scores[r]
            for step in (8, 4, 2, 1):
                weight_sum += cuda.shfl_xor_sync(ALL_LANES, weight_sum, step)
            total[r] = total[r] * shrink + weight_sum
            for part in range(parts):
                sums[r * parts + part] *= shrink

    @cuda.jit(device=True, inline="always")
    def add_values(
        sums: Any, weights: Any, shared: Any, v_cache: Any, start: Any, lane: Any, warp: Any
    ) -> None:
        """sums[r · parts + p] is of row r and dimension 32p + lane; shared is [page_warps · 16 · ROWS]."""
        first = warp * t.PAGE * ROWS
        if lane < t.PAGE:
            for r in range(ROWS):
                shared[first + lane * ROWS + r] = weights[r]
        cuda.syncwarp()
        for token in range(t.PAGE):
            for part in range(parts):
                value = v_cache[start + token * head_dim + part * WARP + lane]
                for r in range(ROWS):
                    sums[r * parts + part] += shared[first + token * ROWS + r] * value
        cuda.syncwarp()

    @cuda.jit(device=True, inline="always")
    def merge_warps(sums: Any, top: Any, total: Any, lane: Any, warp: Any) -> None:
        """The last warp ends up with the sums, tops and totals of all."""
        stats = cuda.shared.array(num_stats, types.float32)
        shared = cuda.shared.array(tile_size, types.float32)
        if lane == 0:
            for r in range(ROWS):
                stats[(warp * ROWS + r) * 2] = top[r]
                stats[(warp * ROWS + r) * 2 + 1] = total[r]
        cuda.syncthreads()
        for r in range(ROWS):
            highest = top[r]
            for other in range(page_warps):
                highest = max(highest, stats[(other * ROWS + r) * 2])
            total[r] = np.float32(0.0)
            for other in range(page_warps):
                at = (other * ROWS + r) * 2
                total[r] += stats[at + 1] * primitives.exp2(stats[at] - highest)
            for part in range(parts):
                sums[r * parts + part] *= primitives.exp2(top[r] - highest)
            top[r] = highest
        for turn in range(page_warps):
            if warp == turn:
                for i in range(num_sums):
                    if turn > 0:
                        sums[i] += shared[i * WARP + lane]
                    shared[i * WARP + lane] = sums[i]
            cuda.syncthreads()

    def paged_attention(
        q: Float32s,
        k_cache: Float32s,
        v_cache: Float32s,
        out: Float32s,
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
        tile = cuda.blockIdx.x * t.TILE_FIELDS
        first_row = tiles[tile + t.FIRST_ROW]
        num_rows = tiles[tile + t.END_ROW] - first_row
        if num_rows <= 0:
            return
        num_heads = cuda.gridDim.y * group
        queries = cuda.shared.array(tile_size, types.float32)
        weights = cuda.shared.array(num_weights, types.float32)
        query = cuda.shared.array(ROWS, types.int32)
        head = cuda.shared.array(ROWS, types.int32)
        if warp == 0 and lane < ROWS:
            # Rows past the end repeat the last one; they are computed, but not written.
            row = first_row + min(lane, num_rows - 1)
            query[lane] = query_ids[tiles[tile + t.FIRST_QUERY] + row // group]
            head[lane] = cuda.blockIdx.y * group + row % group
        cuda.syncthreads()
        for i in range(warp * WARP + lane, tile_size, page_warps * WARP):
            r = i // head_dim
            queries[i] = q[(query[r] * num_heads + head[r]) * head_dim + i % head_dim]
        cuda.syncthreads()

        # All rows see the tokens before all_see, none those from end_seen on.
        all_see, end_seen = 1 << 30, 0
        for r in range(ROWS):
            limit = visible[query[r]]
            all_see = min(all_see, limit)
            end_seen = max(end_seen, limit + (t.TREE_TOKENS if ancestors[query[r]] != 0 else 0))
        split_pages = tiles[tile + t.SPLIT_PAGES]
        first = tiles[tile + t.FIRST_PAGE] + cuda.blockIdx.z * split_pages
        end = min(first + split_pages, tiles[tile + t.END_PAGE], (end_seen + t.PAGE - 1) // t.PAGE)
        table = tiles[tile + t.TABLE] * table_width
        sums, scores = cuda.local.array(num_sums, types.float32), cuda.local.array(ROWS, types.float32)
        top, total = cuda.local.array(ROWS, types.float32), cuda.local.array(ROWS, types.float32)
        for i in range(num_sums):
            sums[i] = np.float32(0.0)
        for r in range(ROWS):
            top[r], total[r] = t.LOWEST, np.float32(0.0)
        for page in range(first + warp, end, page_warps):
            start = (tables[table + page] * cuda.gridDim.y + cuda.blockIdx.y) * page_size
            score(scores, queries, k_cache, start, lane)
            token = page * t.PAGE + lane % t.PAGE
            for r in range(ROWS):
                scores[r] *= scale
                if (page + 1) * t.PAGE > all_see:
                    if not sees(token, visible[query[r]], ancestors[query[r]]):
                        scores[r] = t.MASKED
            soften(scores, sums, top, total)
            add_values(sums, scores, weights, v_cache, start, lane, warp)
        if page_warps > 1:
            merge_warps(sums, top, total, lane, warp)
            if warp < page_warps - 1:
                return
        split = tiles[tile + t.FIRST_SPLIT] + cuda.blockIdx.z
        is_partial = tiles[tile + t.IS_PARTIAL]
        for r in range(ROWS):
            if r < num_rows:
                at = split * num_partial_rows + partial_rows[query[r]] if is_partial else query[r]
                at = at * num_heads + head[r]
                if lane == 0 and is_partial:
                    stats[at * 2], stats[at * 2 + 1] = top[r], total[r]
                for part in range(parts):
                    d = at * head_dim + part * WARP + lane
                    if not is_partial:
                        out[d] = sums[r * parts + part] / total[r]
                    elif total[r] > 0:
                        partial[d] = sums[r * parts + part]

    return paged_attention
