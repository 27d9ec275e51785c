"""The decoder on a CPU: weights packed for our kernels, a whole step in one call."""

from collections.abc import Callable
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from engine.batch import Batch
from engine.errors import ModelError
from engine.kernels import cpu
from engine.kv_pool import KVPool
from engine.model.layer_weights import LayerWeights, load_layer, matrices_in_4_bits
from engine.model.rope import rope_tables
from engine.weights.checkpoint import Checkpoint

Pack = Callable[[torch.Tensor], cpu.PackedWeight]
NOTHING = torch.empty(0)
# The attention kernels work on whole vectors of a head.
HEAD_DIM_MULTIPLE = 32


class CpuDecoder:
    """A `Model`. The residual stream, norms, softmax and logits are float32 whatever the weights' type."""

    def __init__(
        self, checkpoint: Checkpoint, dtype: torch.dtype, max_position: int, int8_weights: bool = False
    ) -> None:
        """`dtype` of embeddings and matrices: float32, or bfloat16; the matrices may be in 8 bits instead,
        or in the 4 that their file has them in."""
        self.config = config = checkpoint.config
        if config.head_dim % HEAD_DIM_MULTIPLE:
            raise ModelError(
                f"{config.name}: head_dim {config.head_dim} is not served on a CPU; "
                f"it must be a multiple of {HEAD_DIM_MULTIPLE}"
            )
        cos, sin = rope_tables(config, max_position)
        self._rope = cos.numpy(), sin.numpy()
        embedding = checkpoint.tensor("model.embed_tokens.weight", (config.vocab_size, config.hidden_size))
        self._embedding = embedding.to(dtype)
        self._logits = torch.empty(0, config.vocab_size)
        self._weights = _pack(checkpoint, embedding, dtype, int8_weights)
        self._shape = cpu.DecoderShape(
            config.num_heads, config.intermediate_size, config.rms_norm_eps, config.head_dim**-0.5
        )

    def logits(self, batch: Batch, kv: KVPool) -> torch.Tensor:
        """Valid until the next call."""
        hidden = self._embedding[torch.from_numpy(batch.token_ids)].float()
        logits = self._room_for_logits(len(batch.logit_rows))
        shared = batch.shared_runs
        rows = cpu.DecoderBatch(
            batch.positions, batch.slot_mapping, batch.block_tables, batch.cu_query_lens, batch.context_lens,
            batch.logit_rows, shared.group_of, shared.group_blocks, shared.group_lens,
            batch.tree or cpu.causal(batch.cu_query_lens, batch.context_lens),
        )  # fmt: skip
        cpu.decoder_step(
            hidden.numpy(), self._weights, self._shape, self._rope, rows, kv.as_numpy(), logits.numpy()
        )
        return logits

    def _room_for_logits(self, num_rows: int) -> torch.Tensor:
        """The same memory for every step: new pages would have to be cleared."""
        if num_rows > len(self._logits):
            self._logits = torch.empty(num_rows, self.config.vocab_size)
        return self._logits[:num_rows]


def _pack(
    checkpoint: Checkpoint, embedding: torch.Tensor, dtype: torch.dtype, int8_weights: bool
) -> cpu.DecoderWeights:
    """Layer after layer into stacked arrays, so that only one layer is ever held twice."""
    num_layers = checkpoint.config.num_layers
    in_4_bits = matrices_in_4_bits(checkpoint) if int8_weights else frozenset()
    pack: Pack = _pack_quantised if int8_weights else partial(_pack_dtype, dtype)

    def packed(index: int) -> tuple[npt.NDArray[np.generic], ...]:
        return _pack_layer(load_layer(checkpoint, index, in_4_bits), pack)

    first = packed(0)
    stacked = [np.empty((num_layers, *part.shape), part.dtype) for part in first]
    for index in range(num_layers):
        layer = packed(index) if index else first
        for target, part in zip(stacked, layer, strict=True):
            target[index] = part
    final_norm = checkpoint.tensor("model.norm.weight", (checkpoint.config.hidden_size,)).numpy()
    return cpu.DecoderWeights._make([*stacked, final_norm, pack(_head(checkpoint, embedding, int8_weights))])


def _head(checkpoint: Checkpoint, embedding: torch.Tensor, int8_weights: bool) -> torch.Tensor:
    shape = checkpoint.config.vocab_size, checkpoint.config.hidden_size
    tied = checkpoint.config.tie_embeddings
    name = "model.embed_tokens.weight" if tied else "lm_head.weight"
    if int8_weights and checkpoint.is_4_bits(name):
        return checkpoint.tensor_4_bits(name, shape)
    return embedding if tied else checkpoint.tensor(name, shape)


def _pack_layer(layer: LayerWeights, pack: Pack) -> tuple[npt.NDArray[np.generic], ...]:
    """In the order of DecoderWeights' layer fields."""

    def optional(part: torch.Tensor | None) -> npt.NDArray[np.float32]:
        return (NOTHING if part is None else part).numpy()

    return (
        layer.input_norm.numpy(),
        pack(layer.qkv),
        optional(layer.qkv_bias),
        optional(layer.q_norm),
        optional(layer.k_norm),
        pack(layer.output),
        layer.post_norm.numpy(),
        pack(torch.from_numpy(cpu.pair_gate_up(layer.gate_up.numpy()))),
        pack(layer.down),
    )


def _pack_dtype(dtype: torch.dtype, weight: torch.Tensor) -> cpu.PackedWeight:
    """As float32, or the bits of bfloat16."""
    if dtype == torch.float32:
        return cpu.pack_weight(weight.numpy())
    return cpu.pack_weight(weight.to(torch.bfloat16).view(torch.uint16).numpy())


def _pack_quantised(weight: torch.Tensor) -> cpu.PackedWeight:
    if weight.dtype == torch.uint8:
        return cpu.pack_weight_int4(weight.numpy())
    try:
        return cpu.pack_weight_int8(weight.numpy())
    except ValueError as error:
        raise ModelError(f"--weights int8: {error}") from error
