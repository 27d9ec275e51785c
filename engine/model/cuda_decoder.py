"""The decoder on a GPU, over a paged KV pool."""

from typing import NamedTuple

import torch

from engine.batch import Batch
from engine.errors import ModelError
from engine.kernels.cuda.kernels import CudaKernels, HeadNorms
from engine.kv_pool import KVPool
from engine.model.cuda_graphs import DecodeGraphs
from engine.model.cuda_linear import CudaHead, CudaLinear
from engine.model.cuda_ops import CudaOps, DeviceBatch
from engine.model.layer_weights import load_layer
from engine.model.rope import rope_tables
from engine.weights.checkpoint import Checkpoint

HEAD_DIMS = (64, 96, 128)


class CudaLayer(NamedTuple):
    input_norm: torch.Tensor  # float32 [H]
    qkv: CudaLinear
    head_norms: HeadNorms | None  # Qwen3
    output: CudaLinear
    post_norm: torch.Tensor  # float32 [H]
    gate_up: CudaLinear
    down: CudaLinear


class CudaDecoder:
    """A `Model`. The residual stream, norms, softmax and logits are float32; between them travels `dtype`."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        max_position: int,
        kernels: CudaKernels,
    ) -> None:
        self.kernels = kernels
        self.config = config = checkpoint.config
        if config.head_dim not in HEAD_DIMS:
            raise ModelError(
                f"{config.name}: head_dim {config.head_dim} is not served on a GPU; served are {HEAD_DIMS}; "
                "use --device cpu"
            )
        group = config.num_heads // config.num_kv_heads
        kernels.prepare(dtype, config.head_dim, group, config.has_qk_norm)
        self._ops = CudaOps(kernels, config.num_heads, config.num_kv_heads, dtype)
        device = kernels.launcher.device
        cos, sin = rope_tables(config, max_position)
        self._rope = cos.to(device), sin.to(device)
        shape = config.vocab_size, config.hidden_size
        self._embedding = checkpoint.tensor("model.embed_tokens.weight", shape).to(device, dtype)
        self._layers = [self._load_layer(checkpoint, index) for index in range(config.num_layers)]
        self._final_norm = checkpoint.tensor("model.norm.weight", (config.hidden_size,)).to(device)
        head = self._embedding
        if not config.tie_embeddings:
            head = checkpoint.tensor("lm_head.weight", shape).to(device, dtype)
        self._head = CudaHead(head)
        self._graphs: DecodeGraphs | None = None

    def record_decodes(self, kv: KVPool, max_sequences: int, max_context: int) -> None:
        """From now on, steps of one row a sequence are replayed as CUDA graphs. Takes some seconds."""

        def step(batch: DeviceBatch) -> torch.Tensor:
            return self._head(self._hidden(batch, kv))

        self._graphs = DecodeGraphs(step, self._ops, max_sequences, max_context)

    def logits(self, batch: Batch, kv: KVPool) -> torch.Tensor:
        logits = self._graphs.run(batch) if self._graphs is not None else None
        if logits is None:
            logits = self._launched(batch, kv)
        elif len(batch.logit_rows) < len(logits):
            logits = logits[batch.logit_rows]
        if not len(logits):
            # Nothing of this step is read back, so nothing else waits for its end.
            self.kernels.launcher.wait()
        return logits

    def _launched(self, batch: Batch, kv: KVPool) -> torch.Tensor:
        on_device = self._ops.to_device(batch)
        hidden = self._hidden(on_device, kv)
        if not len(batch.logit_rows):
            return hidden.new_empty(0, self.config.vocab_size, dtype=torch.float32)
        return self._head(hidden.index_select(0, on_device.logit_rows))

    def _hidden(self, batch: DeviceBatch, kv: KVPool) -> torch.Tensor:
        """Computes every row, writes its K/V; normed final states [T, H]."""
        config, eps, ops = self.config, self.config.rms_norm_eps, self._ops
        residual = torch.nn.functional.embedding(batch.token_ids, self._embedding).float()
        x = ops.rms_norm(residual, self._layers[0].input_norm, eps)
        for i, layer in enumerate(self._layers):
            qkv = layer.qkv(x)
            q = ops.rope_write_kv(qkv, self._rope, batch, kv, i, config.num_heads, layer.head_norms)
            attended = ops.attention(q, batch, kv, i, config.head_dim**-0.5)
            x = ops.add_rms_norm(residual, layer.output(attended), layer.post_norm, eps)
            activated = ops.silu_mul(layer.gate_up(x))
            following = self._layers[i + 1].input_norm if i + 1 < len(self._layers) else self._final_norm
            x = ops.add_rms_norm(residual, layer.down(activated), following, eps)
        return x

    def _load_layer(self, checkpoint: Checkpoint, index: int) -> CudaLayer:
        layer, device = load_layer(checkpoint, index), self._ops.device

        def elements(weight: torch.Tensor) -> torch.Tensor:
            return weight.to(device, self._ops.dtype)

        norms = None
        if layer.q_norm is not None and layer.k_norm is not None:
            norms = HeadNorms(layer.q_norm.to(device), layer.k_norm.to(device), self.config.rms_norm_eps)
        bias = None if layer.qkv_bias is None else elements(layer.qkv_bias)
        return CudaLayer(
            input_norm=layer.input_norm.to(device),
            qkv=CudaLinear(elements(layer.qkv), bias),
            head_norms=norms,
            output=CudaLinear(elements(layer.output)),
            post_norm=layer.post_norm.to(device),
            gate_up=CudaLinear(elements(layer.gate_up)),
            down=CudaLinear(elements(layer.down)),
        )
