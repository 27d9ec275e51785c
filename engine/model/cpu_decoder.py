"""The decoder on a CPU: weights packed for our kernels, a whole step in one call."""

import torch

from engine.batch import Batch
from engine.errors import ModelError
from engine.kernels import cpu
from engine.kv_pool import KVPool
from engine.model.cpu_weights import pack_weights
from engine.model.rope import rope_tables
from engine.weights.checkpoint import Checkpoint

# The attention kernels work on whole vectors of a head.
HEAD_DIM_MULTIPLE = 32


class CpuDecoder:
    """A `Model`. The residual stream, norms, softmax and logits are float32 whatever the weights' type."""

    def __init__(
        self, checkpoint: Checkpoint, dtype: torch.dtype, max_position: int, weights: str = "dtype"
    ) -> None:
        """`dtype` of embeddings and matrices: float32, or bfloat16; the matrices may be of other forms, see
        `pack_weights`."""
        self.config = config = checkpoint.config
        if config.head_dim % HEAD_DIM_MULTIPLE:
            raise ModelError(
                f"{config.name}: head_dim {config.head_dim} is not served on a CPU; "
                f"it must be a multiple of {HEAD_DIM_MULTIPLE}"
            )
        cos, sin = rope_tables(config, max_position)
        self._rope = cos.numpy(), sin.numpy()
        embedding = checkpoint.tensor("model.embed_tokens.weight", (config.vocab_size, config.hidden_size))
        self._logits = torch.empty(0, config.vocab_size)
        self._weights = pack_weights(checkpoint, embedding, dtype, weights)
        self._shape = cpu.DecoderShape(
            config.num_heads, config.intermediate_size, config.rms_norm_eps, config.head_dim**-0.5
        )

    def logits(self, batch: Batch, kv: KVPool) -> torch.Tensor:
        """Valid until the next call."""
        logits = self._room_for_logits(len(batch.logit_rows))
        shared = batch.shared_runs
        rows = cpu.DecoderBatch(
            batch.token_ids, batch.positions, batch.slot_mapping, batch.block_tables, batch.cu_query_lens,
            batch.context_lens, batch.logit_rows, shared.group_of, shared.group_blocks, shared.group_lens,
            batch.tree or cpu.causal(batch.cu_query_lens, batch.context_lens),
        )  # fmt: skip
        cpu.decoder_step(self._weights, self._shape, self._rope, rows, kv.as_numpy(), logits.numpy())
        return logits

    def _room_for_logits(self, num_rows: int) -> torch.Tensor:
        """The same memory for every step: new pages would have to be cleared."""
        if num_rows > len(self._logits):
            self._logits = torch.empty(num_rows, self.config.vocab_size)
        return self._logits[:num_rows]
