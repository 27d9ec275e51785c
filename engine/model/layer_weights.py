"""A decoder layer's weights, as every backend takes them from a checkpoint."""

from dataclasses import dataclass

import torch

from engine.weights.checkpoint import Checkpoint


@dataclass(frozen=True)
class LayerWeights:
    """float32. H hidden, Q and V the sizes of all query and all KV heads, I intermediate, D head_dim."""

    input_norm: torch.Tensor  # [H]
    qkv: torch.Tensor  # [Q + 2 V, H]
    qkv_bias: torch.Tensor | None  # [Q + 2 V], Qwen2
    q_norm: torch.Tensor | None  # [D], Qwen3
    k_norm: torch.Tensor | None  # [D], Qwen3
    output: torch.Tensor  # [H, Q]
    post_norm: torch.Tensor  # [H]
    gate_up: torch.Tensor  # [2 I, H], gates first
    down: torch.Tensor  # [H, I]


def load_layer(checkpoint: Checkpoint, index: int) -> LayerWeights:
    """Raises ModelError naming a tensor that is missing or has another shape."""
    c, prefix = checkpoint.config, f"model.layers.{index}."
    q_size, kv_size = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    parts = (("q", q_size), ("k", kv_size), ("v", kv_size))

    def get(name: str, *shape: int) -> torch.Tensor:
        return checkpoint.tensor(prefix + name, shape)

    bias = None
    if c.has_qkv_bias:
        bias = torch.cat([get(f"self_attn.{n}_proj.bias", size) for n, size in parts])
    gates = [get(f"mlp.{n}_proj.weight", c.intermediate_size, c.hidden_size) for n in ("gate", "up")]
    return LayerWeights(
        input_norm=get("input_layernorm.weight", c.hidden_size),
        qkv=torch.cat([get(f"self_attn.{n}_proj.weight", size, c.hidden_size) for n, size in parts]),
        qkv_bias=bias,
        q_norm=get("self_attn.q_norm.weight", c.head_dim) if c.has_qk_norm else None,
        k_norm=get("self_attn.k_norm.weight", c.head_dim) if c.has_qk_norm else None,
        output=get("self_attn.o_proj.weight", c.hidden_size, q_size),
        post_norm=get("post_attention_layernorm.weight", c.hidden_size),
        gate_up=torch.cat(gates),
        down=get("mlp.down_proj.weight", c.hidden_size, c.intermediate_size),
    )
