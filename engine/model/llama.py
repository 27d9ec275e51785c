"""The decoder of the Llama line (Llama, Mistral, Qwen2, Qwen3) over a paged KV pool.

The residual stream, norms, softmax and logits are float32 whatever the weights' type.
"""

from dataclasses import dataclass

import torch

from engine.batch import Batch
from engine.kv_pool import KVPool
from engine.model import cpu_ops as ops
from engine.model.config import ModelConfig
from engine.model.linear import Linear, make_linear
from engine.model.rope import rope_tables
from engine.weights.checkpoint import Checkpoint


@dataclass(frozen=True)
class Layer:
    input_norm: torch.Tensor  # [H]
    qkv: Linear
    qk_norms: tuple[torch.Tensor, torch.Tensor] | None  # each [head_dim], Qwen3
    output: Linear
    post_norm: torch.Tensor  # [H]
    gate_up: Linear
    down: Linear


class Llama:
    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, max_position: int) -> None:
        self.config = config = checkpoint.config
        self.dtype = dtype
        self._rope = rope_tables(config, max_position)
        embedding = checkpoint.tensor("model.embed_tokens.weight", (config.vocab_size, config.hidden_size))
        self._embedding = embedding.to(dtype)
        self._layers = [_load_layer(checkpoint, i, dtype) for i in range(config.num_layers)]
        self._final_norm = checkpoint.tensor("model.norm.weight", (config.hidden_size,))
        head = embedding if config.tie_embeddings else checkpoint.tensor("lm_head.weight", embedding.shape)
        self._head = make_linear(head, dtype)

    def forward(self, batch: Batch, kv: KVPool) -> torch.Tensor:
        """Computes every row, writes its K/V; the final hidden states, float32 [T, H]."""
        config, eps = self.config, self.config.rms_norm_eps
        residual = self._embedding[torch.from_numpy(batch.token_ids)].float()
        x = ops.rms_norm(residual, self._layers[0].input_norm, eps)
        for i, layer in enumerate(self._layers):
            qkv = layer.qkv(x)
            if layer.qk_norms is not None:
                _norm_heads(qkv, layer.qk_norms, config)
            q = ops.rope_write_kv(qkv, self._rope, batch, kv, i, config.num_heads)
            attended = ops.attention(q, batch, kv, i, config.head_dim**-0.5)
            x = ops.add_rms_norm(residual, layer.output(attended), layer.post_norm, eps)
            activated = ops.silu_mul(layer.gate_up(x))
            following = self._layers[i + 1].input_norm if i + 1 < len(self._layers) else self._final_norm
            x = ops.add_rms_norm(residual, layer.down(activated), following, eps)
        return x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """float32 [R, H] to float32 [R, vocab]."""
        return self._head(hidden)


def _load_layer(checkpoint: Checkpoint, index: int, dtype: torch.dtype) -> Layer:
    c, prefix = checkpoint.config, f"model.layers.{index}."
    q_size, kv_size = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim

    def get(name: str, *shape: int) -> torch.Tensor:
        return checkpoint.tensor(prefix + name, shape)

    qkv = torch.cat(
        [get(f"self_attn.{n}_proj.weight", size, c.hidden_size) for n, size in _qkv_sizes(q_size, kv_size)]
    )
    bias = None
    if c.has_qkv_bias:
        bias = torch.cat([get(f"self_attn.{n}_proj.bias", size) for n, size in _qkv_sizes(q_size, kv_size)])
    qk_norms = None
    if c.has_qk_norm:
        qk_norms = get("self_attn.q_norm.weight", c.head_dim), get("self_attn.k_norm.weight", c.head_dim)
    gate_up = torch.cat(
        [get(f"mlp.{n}_proj.weight", c.intermediate_size, c.hidden_size) for n in ("gate", "up")]
    )
    return Layer(
        input_norm=get("input_layernorm.weight", c.hidden_size),
        qkv=make_linear(qkv, dtype, bias),
        qk_norms=qk_norms,
        output=make_linear(get("self_attn.o_proj.weight", c.hidden_size, q_size), dtype),
        post_norm=get("post_attention_layernorm.weight", c.hidden_size),
        gate_up=make_linear(gate_up, dtype),
        down=make_linear(get("mlp.down_proj.weight", c.hidden_size, c.intermediate_size), dtype),
    )


def _qkv_sizes(q_size: int, kv_size: int) -> tuple[tuple[str, int], ...]:
    return ("q", q_size), ("k", kv_size), ("v", kv_size)


def _norm_heads(qkv: torch.Tensor, norms: tuple[torch.Tensor, torch.Tensor], c: ModelConfig) -> None:
    """RMS norm of every q and k head, in place (Qwen3)."""
    heads = qkv.view(qkv.shape[0], -1, c.head_dim)
    for part, weight in (
        (heads[:, : c.num_heads], norms[0]),
        (heads[:, c.num_heads : c.num_heads + c.num_kv_heads], norms[1]),
    ):
        part.copy_(torch.nn.functional.rms_norm(part, (c.head_dim,), weight, c.rms_norm_eps))
