"""Models with random weights, made on the device: a checkpoint need not travel."""

from pathlib import Path

import torch

from engine.errors import ModelError
from engine.model.config import ModelConfig

# The shape of Llama 3.2 1B.
LLAMA_1B = ModelConfig(
    name="random", architecture="llama", num_layers=16, hidden_size=2048, num_heads=32, num_kv_heads=8,
    head_dim=64, intermediate_size=8192, vocab_size=128_256, max_position=8192, rms_norm_eps=1e-5,
    rope_theta=500_000.0, rope_scaling=None, tie_embeddings=True, eos_token_ids=(),
)  # fmt: skip


class RandomCheckpoint:
    """A `Checkpoint` of weights that keep the residual stream of order one."""

    path = Path("random")
    fingerprint = "random"

    def __init__(self, config: ModelConfig, device: torch.device) -> None:
        self.config = config
        self._device = device

    def tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if len(shape) == 1:
            return torch.ones(shape, device=self._device)
        return torch.randn(shape, device=self._device) * float(shape[-1] ** -0.5)

    def has(self, name: str) -> bool:
        return True

    def stored_bits(self, name: str) -> int | None:
        return None

    def tensor_4_bits(self, name: str, shape: tuple[int, int]) -> torch.Tensor:
        raise ModelError(f"random weights are not of 4 bits: {name}")
