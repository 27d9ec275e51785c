"""A decoder layer's weights, as every backend takes them from a checkpoint."""

from collections.abc import Container
from dataclasses import dataclass

import torch

from engine.weights.checkpoint import Checkpoint

# What each matrix of a layer is made of.
_MATRICES = {
    "qkv": [f"self_attn.{part}_proj.weight" for part in "qkv"],
    "output": ["self_attn.o_proj.weight"],
    "gate_up": ["mlp.gate_proj.weight", "mlp.up_proj.weight"],
    "down": ["mlp.down_proj.weight"],
}


@dataclass(frozen=True)
class LayerWeights:
    """float32; a matrix in 4 bits is uint8, see `Checkpoint.tensor_4_bits`. H hidden, Q and V the sizes of
    all query and all KV heads, I intermediate, D head_dim."""

    input_norm: torch.Tensor  # [H]
    qkv: torch.Tensor  # [Q + 2 V, H]
    qkv_bias: torch.Tensor | None  # [Q + 2 V], Qwen2
    q_norm: torch.Tensor | None  # [D], Qwen3
    k_norm: torch.Tensor | None  # [D], Qwen3
    output: torch.Tensor  # [H, Q]
    post_norm: torch.Tensor  # [H]
    gate_up: torch.Tensor  # [2 I, H], gates first
    down: torch.Tensor  # [H, I]


def stored_bits(checkpoint: Checkpoint) -> dict[str, int]:
    """Of each matrix that the file stores in the same few bits in every layer."""
    layers = range(checkpoint.config.num_layers)
    bits = {
        matrix: {checkpoint.stored_bits(f"model.layers.{layer}.{part}") for layer in layers for part in parts}
        for matrix, parts in _MATRICES.items()
    }
    return {
        matrix: found.pop() or 0 for matrix, found in bits.items() if len(found) == 1 and None not in found
    }


def load_layer(checkpoint: Checkpoint, index: int, in_4_bits: Container[str] = ()) -> LayerWeights:
    """`in_4_bits` names the matrices that stay as they are stored. Raises ModelError naming a tensor that is
    missing or has another shape."""
    c, prefix = checkpoint.config, f"model.layers.{index}."
    q_size, kv_size = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim

    def get(name: str, *shape: int) -> torch.Tensor:
        return checkpoint.tensor(prefix + name, shape)

    def matrix(name: str, num_inputs: int, *sizes: int) -> torch.Tensor:
        load = checkpoint.tensor_4_bits if name in in_4_bits else checkpoint.tensor
        parts = zip(_MATRICES[name], sizes, strict=True)
        return torch.cat([load(prefix + part, (size, num_inputs)) for part, size in parts])

    bias = None
    if c.has_qkv_bias:
        parts = (("q", q_size), ("k", kv_size), ("v", kv_size))
        bias = torch.cat([get(f"self_attn.{n}_proj.bias", size) for n, size in parts])
    return LayerWeights(
        input_norm=get("input_layernorm.weight", c.hidden_size),
        qkv=matrix("qkv", c.hidden_size, q_size, kv_size, kv_size),
        qkv_bias=bias,
        q_norm=get("self_attn.q_norm.weight", c.head_dim) if c.has_qk_norm else None,
        k_norm=get("self_attn.k_norm.weight", c.head_dim) if c.has_qk_norm else None,
        output=matrix("output", q_size, c.hidden_size),
        post_norm=get("post_attention_layernorm.weight", c.hidden_size),
        gate_up=matrix("gate_up", c.hidden_size, c.intermediate_size, c.intermediate_size),
        down=matrix("down", c.intermediate_size, c.hidden_size),
    )
