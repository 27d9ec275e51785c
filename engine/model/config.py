"""What a decoder of the Llama line is made of, whatever file it comes from."""

from dataclasses import dataclass

from engine.errors import ModelError


@dataclass(frozen=True)
class RopeScaling:
    """Stretches rotary positions beyond the trained context (names as in Hugging Face configs)."""

    kind: str  # "linear", "llama3", "yarn" or "factors"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    frequency_factors: tuple[float, ...] = ()  # what each frequency is divided by


@dataclass(frozen=True)
class ModelConfig:
    name: str
    architecture: str  # "llama", "mistral", "qwen2" or "qwen3"
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    tie_embeddings: bool
    eos_token_ids: tuple[int, ...]

    @property
    def has_qkv_bias(self) -> bool:
        return self.architecture == "qwen2"

    @property
    def has_qk_norm(self) -> bool:
        return self.architecture == "qwen3"

    @property
    def qkv_size(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    def validate(self) -> "ModelConfig":
        """Raises ModelError when the shape cannot be served."""
        if self.num_heads % self.num_kv_heads:
            raise ModelError(
                f"{self.name}: {self.num_heads} heads cannot share {self.num_kv_heads} KV heads evenly"
            )
        if self.head_dim % 2:
            raise ModelError(f"{self.name}: head_dim {self.head_dim} is odd; rotary embedding needs pairs")
        return self
