"""Rotary position embedding tables with the scalings of the Llama line.

Formulas: Su et al. 2021 (RoPE); Peng et al. 2023 (YaRN); Llama 3.1 frequency bands as in the Hugging Face
transformers configuration of the same names.
"""

import math

import torch

from engine.errors import ModelError
from engine.model.config import ModelConfig, RopeScaling


def rope_tables(config: ModelConfig, num_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, each float32 [num_positions, head_dim / 2]."""
    half = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    inv_freq = 1.0 / config.rope_theta**half
    magnitude = 1.0
    if config.rope_scaling is not None:
        inv_freq, magnitude = _scale(inv_freq, config, config.rope_scaling)
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), inv_freq)
    return angles.cos() * magnitude, angles.sin() * magnitude


def _scale(inv_freq: torch.Tensor, config: ModelConfig, scaling: RopeScaling) -> tuple[torch.Tensor, float]:
    if scaling.kind == "linear":
        return inv_freq / scaling.factor, 1.0
    if scaling.kind == "factors":
        return inv_freq / torch.tensor(scaling.frequency_factors), 1.0
    if scaling.kind == "llama3":
        return _llama3(inv_freq, scaling), 1.0
    if scaling.kind == "yarn":
        return _yarn(inv_freq, config, scaling)
    raise ModelError(
        f"{config.name}: rope scaling {scaling.kind!r} is unknown; served are linear, llama3, yarn"
    )


def _llama3(inv_freq: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Long wavelengths are stretched, short ones kept, those between blended."""
    wavelength = 2 * math.pi / inv_freq
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = ((scaling.original_max_position / wavelength - low) / (high - low)).clamp(0, 1)
    return keep * inv_freq + (1 - keep) * inv_freq / scaling.factor


def _yarn(inv_freq: torch.Tensor, config: ModelConfig, scaling: RopeScaling) -> tuple[torch.Tensor, float]:
    def dimension(rotations: float) -> float:
        ratio = scaling.original_max_position / (rotations * 2 * math.pi)
        return config.head_dim * math.log(ratio) / (2 * math.log(config.rope_theta))

    low = max(math.floor(dimension(scaling.beta_fast)), 0)
    high = min(math.ceil(dimension(scaling.beta_slow)), config.head_dim - 1)
    index = torch.arange(inv_freq.numel(), dtype=torch.float32)
    stretch = ((index - low) / max(high - low, 0.001)).clamp(0, 1)
    scaled = inv_freq / scaling.factor * stretch + inv_freq * (1 - stretch)
    magnitude = scaling.attention_factor
    if magnitude is None:
        magnitude = 0.1 * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0
    return scaled, magnitude
