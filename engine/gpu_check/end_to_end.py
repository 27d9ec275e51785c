"""Decoding with a model of random weights: whole steps, as CUDA graphs and launched one by one."""

import numpy as np
import torch

from engine import kv_pool
from engine.batch import Batch
from engine.gpu_check.parity import Kernels
from engine.gpu_check.random_model import LLAMA_1B, RandomCheckpoint
from engine.gpu_check.report import Measurement
from engine.gpu_check.timing import seconds
from engine.kv_pool import BLOCK_SIZE, KVPool
from engine.model.cuda_decoder import CudaDecoder
from engine.shared_runs import find_shared_runs

CONTEXT = 2048
BATCHES = (1, 8, 32, 128)
# Greatest difference of logits, relative to the greatest logit: rounding in another order, 16 layers of it.
SAME = 5e-2


@torch.inference_mode()
def measure(kernels: Kernels, device: torch.device) -> list[Measurement]:
    torch.manual_seed(0)
    model = CudaDecoder(
        RandomCheckpoint(LLAMA_1B, device), torch.bfloat16, LLAMA_1B.max_position, kernels(LLAMA_1B.head_dim)
    )
    num_blocks = max(BATCHES) * (CONTEXT // BLOCK_SIZE + 1)
    kv = _filled_pool(num_blocks, device)
    prefill = _prefill_rows_per_second(model, kv)
    batches = {size: _decode_batch(size, shares=False) for size in BATCHES}
    launched = {size: model.logits(batch, kv) for size, batch in batches.items()}
    eager = {size: _step_seconds(model, batch, kv) for size, batch in batches.items()}
    shared_batch = _decode_batch(32, shares=True)
    shared_launched = model.logits(shared_batch, kv)
    model.record_decodes(kv, max(BATCHES), CONTEXT + BLOCK_SIZE)
    measurements = [Measurement("model.prefill", prefill, "tokens/s", "higher")]
    for size, batch in batches.items():
        difference = _difference(model.logits(batch, kv), launched[size])
        step = _step_seconds(model, batch, kv)
        measurements += [
            Measurement(
                f"model.graph_parity.batch{size}", difference, "of the greatest logit", "lower", SAME
            ),
            Measurement(f"model.decode.batch{size}", size / step, "tokens/s", "higher"),
            Measurement(f"model.decode.batch{size}.without_graph", size / eager[size], "tokens/s", "higher"),
        ]
    difference = _difference(model.logits(shared_batch, kv), shared_launched)
    step = _step_seconds(model, shared_batch, kv)
    return [
        *measurements,
        Measurement("model.graph_parity.shared32", difference, "of the greatest logit", "lower", SAME),
        Measurement("model.decode.shared32", 32 / step, "tokens/s", "higher"),
        _chunks_agree(model, kv),
    ]


def _filled_pool(num_blocks: int, device: torch.device) -> KVPool:
    shape = LLAMA_1B.num_layers, 2, num_blocks, LLAMA_1B.num_kv_heads, BLOCK_SIZE, LLAMA_1B.head_dim
    return kv_pool.KVPool(torch.randn(shape, dtype=torch.bfloat16, device=device))


def _batch(
    starts: list[int], counts: list[int], tables: np.ndarray[tuple[int, int], np.dtype[np.int32]]
) -> Batch:
    """Sequences of which `counts` tokens from `starts` on are computed; the last row of each has logits."""
    cu_query_lens = np.cumsum([0, *counts]).astype(np.int32)
    positions = np.concatenate([np.arange(s, s + n) for s, n in zip(starts, counts, strict=True)])
    sequences = np.repeat(np.arange(len(starts)), counts)
    slots = tables[sequences, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE
    return Batch(
        scheduled=(),
        token_ids=(positions * 31 % LLAMA_1B.vocab_size).astype(np.int32),
        positions=positions.astype(np.int32),
        slot_mapping=slots.astype(np.int32),
        cu_query_lens=cu_query_lens,
        context_lens=(np.array(starts) + counts).astype(np.int32),
        block_tables=tables,
        logit_rows=cu_query_lens[1:] - 1,
        shared_runs=find_shared_runs(tables, np.array(starts, np.int32), np.array(counts, np.int32)),
    )


def _decode_batch(size: int, shares: bool) -> Batch:
    """New tokens go to blocks of their own, so that no step changes what another one reads."""
    blocks = CONTEXT // BLOCK_SIZE
    contexts = np.random.default_rng(0).permutation(size * blocks).reshape(size, blocks)
    if shares:  # three quarters of the context
        contexts[:, : blocks * 3 // 4] = contexts[0, : blocks * 3 // 4]
    written = max(BATCHES) * blocks + np.arange(size)[:, None]
    tables = np.concatenate([contexts, written], 1).astype(np.int32)
    return _batch([CONTEXT + s % BLOCK_SIZE for s in range(size)], [1] * size, tables)


def _step_seconds(model: CudaDecoder, batch: Batch, kv: KVPool) -> float:
    """Preparing and sending the batch included, as in a server."""
    return seconds(lambda: model.logits(batch, kv), repeats=10)


def _prefill_rows_per_second(model: CudaDecoder, kv: KVPool) -> float:
    tables = np.arange(4 * CONTEXT // BLOCK_SIZE, dtype=np.int32).reshape(4, -1)
    batch = _batch([0] * 4, [CONTEXT] * 4, tables)
    return 4 * CONTEXT / seconds(lambda: model.logits(batch, kv))


def _chunks_agree(model: CudaDecoder, kv: KVPool) -> Measurement:
    """A prompt at once, by torch's attention, and in chunks, by ours."""
    length, chunk = 1200, 300
    tables = np.arange(-(-length // BLOCK_SIZE), dtype=np.int32)[None]
    whole = model.logits(_batch([0], [length], tables), kv).clone()
    for start in range(0, length, chunk):
        chunked = model.logits(_batch([start], [chunk], tables), kv)
    difference = _difference(chunked, whole)
    return Measurement("model.chunk_parity", difference, "of the greatest logit", "lower", SAME)


def _difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).abs().nan_to_num(torch.inf).max() / expected.abs().max())
