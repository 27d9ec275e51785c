"""The CPU kernels' figures, on the default model's shapes with random weights; the best of several rounds.

Bandwidths count the weights (or the cache's keys and values) once a call; rates count multiplications and
additions.
"""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.figures import figure
from engine.kernels import cpu

HIDDEN, NUM_HEADS, NUM_KV_HEADS, DIM, INTERMEDIATE, NUM_LAYERS, VOCABULARY = 576, 9, 3, 64, 1536, 30, 49152
PAGE = 16
ROUNDS = 15
Int32 = npt.NDArray[np.int32]


def best_seconds(call: Callable[[], None], rounds: int = ROUNDS) -> float:
    call()
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return min(times)


def random_bits(generator: np.random.Generator, *shape: int) -> npt.NDArray[np.uint16]:
    """Normal numbers in bfloat16."""
    return bfloat16_bits(generator.standard_normal(shape, np.float32))


def bfloat16_bits(numbers: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Rounded towards 0."""
    return (numbers.view(np.uint32) >> 16).astype(np.uint16)


def verify_figures() -> list[dict[str, Any]]:
    generator = np.random.default_rng(0)
    return [
        figure(
            "spec.verify_drafts", drafts_per_second(generator, 1024, 5) / 1e6, "M tokens/s", "higher", 500
        ),
        figure(
            "seed.verify_500k", drafts_per_second(generator, 500_000, 5) / 5e6, "M verifications/s", "higher"
        ),
    ]


def drafts_per_second(generator: np.random.Generator, num_rows: int, num_drafts: int) -> float:
    """Draft tokens judged a second; about half of them match."""
    drafts = generator.integers(0, 2, (num_rows, num_drafts), np.int32)
    targets = generator.integers(0, 2, (num_rows, num_drafts + 1), np.int32)
    counts = np.full(num_rows, num_drafts, np.int32)
    accepted, next_token = np.empty(num_rows, np.int32), np.empty(num_rows, np.int32)
    calls = max(1, 100_000 // num_rows)

    def run() -> None:
        for _ in range(calls):
            cpu.verify_drafts(drafts, targets, counts, accepted, next_token)

    return calls * num_rows * num_drafts / best_seconds(run)


def product_figures() -> list[dict[str, Any]]:
    """The head: large enough to come from memory."""
    generator = np.random.default_rng(0)
    bits = random_bits(generator, VOCABULARY, HIDDEN)
    wide = (bits.astype(np.uint32) << 16).view(np.float32)
    figures = []
    for kind, weight in (("bf16", cpu.pack_weight(bits)), ("int8", cpu.pack_weight_int8(wide))):
        for num_rows in (1, 8, 16, 128):
            x = generator.standard_normal((num_rows, HIDDEN), np.float32)
            out = np.empty((num_rows, VOCABULARY), np.float32)
            seconds = best_seconds(lambda x=x, weight=weight, out=out: cpu.matmul(x, weight, out))  # type: ignore[misc]
            name = f"kernels.matmul_{kind}.m{num_rows}"
            if num_rows == 1:
                figures.append(figure(name, weight.nbytes / seconds / 1e9, "GB/s", "higher"))
            else:
                figures.append(figure(name, 2 * num_rows * wide.size / seconds / 1e9, "GFLOP/s", "higher"))
    return figures


def batch_of(contexts: list[tuple[int, int]], logit_rows: list[int]) -> tuple[cpu.DecoderBatch, int]:
    """A batch of (context length, new rows) over consecutive blocks, and the number of blocks."""
    lengths = np.array([length for length, _ in contexts], np.int32)
    rows = np.array([new for _, new in contexts], np.int32)
    widest = -(-int(lengths.max()) // PAGE)
    tables = np.arange(len(contexts) * widest, dtype=np.int32).reshape(len(contexts), widest)
    ranges = [np.arange(length - new, length, dtype=np.int32) for length, new in contexts]
    slots = [tables[s, at // PAGE] * PAGE + at % PAGE for s, at in enumerate(ranges)]
    cu_query_lens = np.concatenate(([0], np.cumsum(rows))).astype(np.int32)
    none = np.empty(0, np.int32)
    batch = cpu.DecoderBatch(
        np.arange(rows.sum(), dtype=np.int32), np.concatenate(ranges), np.concatenate(slots), tables,
        cu_query_lens, lengths, np.array(logit_rows, np.int32), none, none.reshape(0, 1), none,
        cpu.causal(cu_query_lens, lengths),
    )  # fmt: skip
    return batch, tables.size


def attention_figures() -> list[dict[str, Any]]:
    generator = np.random.default_rng(0)
    cases = {
        "decode_16x1000": [(1000, 1)] * 16,
        "decode_1x3000": [(3000, 1)],
        "prefill_512_at_2800": [(2800, 512)],
    }
    figures = []
    for name, contexts in cases.items():
        batch, num_blocks = batch_of(contexts, [])
        keys, values = random_bits(generator, 2, num_blocks, NUM_KV_HEADS, PAGE, DIM)
        q = generator.standard_normal((len(batch.positions), NUM_HEADS, DIM), np.float32)
        out = np.empty_like(q)

        def run(
            q: Any = q, keys: Any = keys, values: Any = values, batch: Any = batch, out: Any = out
        ) -> None:
            tables = batch.block_tables, batch.cu_query_lens, batch.context_lens
            cpu.paged_attention(q, keys, values, *tables, DIM**-0.5, out)

        seconds = best_seconds(run)
        if name.startswith("decode"):
            read = sum(length for length, _ in contexts) * NUM_KV_HEADS * DIM * 2 * keys.itemsize
            figures.append(figure(f"kernels.attention.{name}", read / seconds / 1e9, "GB/s", "higher"))
        else:
            pairs = int((batch.positions + 1).sum())
            figures.append(
                figure(
                    f"kernels.attention.{name}",
                    4 * NUM_HEADS * DIM * pairs / seconds / 1e9,
                    "GFLOP/s",
                    "higher",
                )
            )
    return figures


def random_decoder(kind: str) -> cpu.DecoderWeights:
    """The default model with random weights of a kind: bf16 or int8."""
    generator = np.random.default_rng(0)

    def matrix(num_outputs: int, depth: int) -> Any:
        # As small as a model's: with larger ones activations underflow, and such numbers are slow.
        weights = generator.standard_normal((num_outputs, depth), np.float32) / np.float32(depth**0.5)
        if kind == "bf16":
            return cpu.pack_weight(bfloat16_bits(weights))
        return cpu.pack_weight_int8(weights)

    def layers(num_outputs: int, depth: int) -> Any:
        return np.stack([matrix(num_outputs, depth)] * NUM_LAYERS)

    norms, none = np.ones((NUM_LAYERS, HIDDEN), np.float32), np.empty((NUM_LAYERS, 0), np.float32)
    qkv_size = (NUM_HEADS + 2 * NUM_KV_HEADS) * DIM
    return cpu.DecoderWeights(
        random_bits(generator, VOCABULARY, HIDDEN), norms, layers(qkv_size, HIDDEN), none, none, none,
        layers(HIDDEN, NUM_HEADS * DIM), norms, layers(2 * INTERMEDIATE, HIDDEN),
        layers(HIDDEN, INTERMEDIATE), norms[0], matrix(VOCABULARY, HIDDEN),
    )  # fmt: skip


def step_figures() -> list[dict[str, Any]]:
    """Whole decode steps: every row's logits, contexts of 300 tokens."""
    shape = cpu.DecoderShape(NUM_HEADS, INTERMEDIATE, 1e-5, DIM**-0.5)
    rope = np.ones((512, DIM // 2), np.float32), np.zeros((512, DIM // 2), np.float32)
    figures = []
    for kind in ("bf16", "int8"):
        weights = random_decoder(kind)
        for num_rows in (1, 8, 16):
            batch, num_blocks = batch_of([(300, 1)] * num_rows, list(range(num_rows)))
            pool = np.zeros((NUM_LAYERS, 2, num_blocks, NUM_KV_HEADS, PAGE, DIM), np.uint16)
            logits = np.empty((num_rows, VOCABULARY), np.float32)

            def run(
                weights: Any = weights, batch: Any = batch, pool: Any = pool, logits: Any = logits
            ) -> None:
                cpu.decoder_step(weights, shape, rope, batch, pool, logits)

            milliseconds = 1e3 * best_seconds(run)
            figures.append(figure(f"kernels.step_{kind}.m{num_rows}_ms", milliseconds, "ms", "lower"))
    return figures


def measure() -> list[dict[str, Any]]:
    return verify_figures() + product_figures() + attention_figures() + step_figures()


if __name__ == "__main__":
    for line in measure():
        print(f"{line['name']:42s} {line['value']:10.2f} {line['unit']}")
