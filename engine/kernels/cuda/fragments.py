"""Paged attention's products on tensor cores: what each lane of a warp loads, and how it multiplies.

Fragments come from memory straight into registers, and in wide loads: a product does not care in which order
its inner dimension is summed, so a lane takes 16 bytes of a key where the tensor core's layout would have it
take four times 4. Lane = 4g + c; a lane holds rows g and g + 8 (`half` 0 and 1) of 16; layouts as in
`primitives.Matrix`. A head is `parts` times 32 dimensions.
"""

from typing import Any, NamedTuple

import numpy as np

from engine.kernels.cuda.parameters import Element


class Fragments(NamedTuple):
    load_queries: Any
    load_keys: Any
    load_values: Any
    score: Any
    add_values: Any
    write_row: Any


def fragments(cuda: Any, primitives: Any, element: Element, head_dim: int) -> Fragments:
    mma, pack = primitives.MATRICES[element]
    low_halves, high_halves = primitives.low_halves, primitives.high_halves
    parts = head_dim // 32

    @cuda.jit(device=True, inline="always")
    def load_queries(queries: Any, q: Any, start: Any, half: Any, c: Any) -> None:
        """Row g + 8 half, which starts there in q."""
        for part in range(parts):
            i = part * 8 + half
            queries[i], queries[i + 2], queries[i + 4], queries[i + 6] = primitives.load4(
                q, start + part * 32 + c * 8
            )

    @cuda.jit(device=True, inline="always")
    def load_keys(keys: Any, cache: Any, page: Any, g: Any, c: Any) -> None:
        """Tokens g and g + 8 of the page that starts there in the cache."""
        for half in range(2):
            for part in range(parts):
                i = (half * parts + part) * 4
                keys[i], keys[i + 1], keys[i + 2], keys[i + 3] = primitives.load4(
                    cache, page + (half * 8 + g) * head_dim + part * 32 + c * 8
                )

    @cuda.jit(device=True, inline="always")
    def load_values(values: Any, cache: Any, page: Any, g: Any, c: Any) -> None:
        """Tokens 2c, 2c + 1, 2c + 8, 2c + 9; of each part dimensions 4g to 4g + 3."""
        for token in range(4):
            for part in range(parts):
                at = page + (token // 2 * 8 + c * 2 + token % 2) * head_dim + part * 32 + g * 4
                i = (token * parts + part) * 2
                values[i], values[i + 1] = primitives.load2(cache, at)

    @cuda.jit(device=True, inline="always")
    def score(scores: Any, queries: Any, keys: Any, scale: Any) -> None:
        """scores[4n + 2r + x] = scale · q · k of row g + 8r and token 8n + 2c + x."""
        for n in range(2):
            s0, s1, s2, s3 = np.float32(0.0), np.float32(0.0), np.float32(0.0), np.float32(0.0)
            for step in range(parts * 2):
                a, b = step * 4, n * parts * 4 + step * 2
                s0, s1, s2, s3 = mma(
                    s0, s1, s2, s3,
                    queries[a], queries[a + 1], queries[a + 2], queries[a + 3],
                    keys[b], keys[b + 1],
                )  # fmt: skip
            i = n * 4
            scores[i], scores[i + 1] = s0 * scale, s1 * scale
            scores[i + 2], scores[i + 3] = s2 * scale, s3 * scale

    @cuda.jit(device=True, inline="always")
    def add_values(sums: Any, shrink: Any, weights: Any, values: Any) -> None:
        """sums = shrink · sums + weights · values.

        sums[16 part + 4j + 2r + x] is of row g + 8r and dimension 32 part + 8c + 4x + j; weights are laid out
        like scores.
        """
        a0, a1 = pack(weights[0], weights[1]), pack(weights[2], weights[3])
        a2, a3 = pack(weights[4], weights[5]), pack(weights[6], weights[7])
        r0, r1 = shrink[0], shrink[1]
        for part in range(parts):
            for j in range(4):
                v0, v1 = values[part * 2 + j // 2], values[(parts + part) * 2 + j // 2]
                v2, v3 = values[(parts * 2 + part) * 2 + j // 2], values[(parts * 3 + part) * 2 + j // 2]
                if j % 2 == 0:
                    b0, b1 = low_halves(v0, v1), low_halves(v2, v3)
                else:
                    b0, b1 = high_halves(v0, v1), high_halves(v2, v3)
                i = part * 16 + j * 4
                sums[i], sums[i + 1], sums[i + 2], sums[i + 3] = mma(
                    sums[i] * r0, sums[i + 1] * r0, sums[i + 2] * r1, sums[i + 3] * r1,
                    a0, a1, a2, a3, b0, b1,
                )  # fmt: skip

    @cuda.jit(device=True, inline="always")
    def write_row(out: Any, start: Any, sums: Any, half: Any, c: Any, factor: Any) -> None:
        """Row g + 8 half of factor · sums to out, from `start` on."""
        for part in range(parts):
            i = part * 16 + half * 2
            primitives.store4(
                out,
                start + part * 32 + c * 8,
                pack(sums[i] * factor, sums[i + 4] * factor),
                pack(sums[i + 8] * factor, sums[i + 12] * factor),
                pack(sums[i + 1] * factor, sums[i + 5] * factor),
                pack(sums[i + 9] * factor, sums[i + 13] * factor),
            )

    return Fragments(load_queries, load_keys, load_values, score, add_values, write_row)
