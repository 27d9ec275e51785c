"""Writes models of the transformers library as GGUF files, the way llama.cpp's converter does."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf import GGMLQuantizationType as Type

Array = npt.NDArray[Any]

# The gguf package cannot quantise to these: random blocks stand in, with the scales at these bytes of a block
# set so that values are small and spread around zero.
_RANDOM_BLOCKS: dict[Type, dict[int, float]] = {
    Type.Q4_K: {0: 5e-4, 2: 3.75e-3},
    Type.Q5_K: {0: 2.5e-4, 2: 3.9e-3},
    Type.Q6_K: {208: 1e-4},
}
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "model.layers": "blk",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(
    path: Path,
    model: Any,
    kind: Type = Type.F32,
    arrays: dict[str, Any] | None = None,
    kinds: dict[str, Type] | None = None,
    **metadata: Any,
) -> None:
    """Writes the model and rounds its weights in place to what the file's say by the gguf package.

    Matrices are stored as `kind`, or as `kinds` says by name, vectors as F32. `metadata` are keys below the
    architecture's name with "__" for "."; None leaves a key out that would be there. `arrays` are keys with
    their full names.
    """
    config = model.config
    arch = {"mistral": "llama"}.get(config.model_type, config.model_type)
    head_dim = model.model.layers[0].self_attn.head_dim
    writer = gguf.GGUFWriter(path, arch)
    keys: dict[str, object] = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention__head_count": config.num_attention_heads,
        "attention__head_count_kv": config.num_key_value_heads,
        "attention__key_length": head_dim,
        "attention__layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope__freq_base": config.rope_parameters["rope_theta"],
    }
    for key, value in {**keys, **metadata}.items():
        if value is not None:
            _add_key(writer, f"{arch}.{key.replace('__', '.')}", value)
    for key, array in (arrays or {}).items():
        writer.add_array(key, array)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, parameter in model.named_parameters():
        values = parameter.detach().numpy()
        raw_type = Type.F32 if values.ndim == 1 else (kinds or {}).get(name, kind)
        stored = values if values.ndim == 1 else _quantise(values, raw_type)
        with torch.no_grad():
            parameter.copy_(torch.from_numpy(gguf.dequantize(stored, raw_type).reshape(values.shape)))
        if arch == "llama" and values.ndim == 2 and (rows := heads.get(name.split(".")[-2])):
            stored = _permute(stored, rows)
        writer.add_tensor(_gguf_name(name), np.ascontiguousarray(stored), raw_dtype=raw_type)
    if config.rope_parameters["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", _frequency_factors(model, head_dim))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_key(writer: gguf.GGUFWriter, key: str, value: object) -> None:
    if isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    else:
        writer.add_uint32(key, value)


def _gguf_name(name: str) -> str:
    for theirs, ours in _NAMES.items():
        name = name.replace(theirs, ours)
    return name


def _quantise(values: Array, kind: Type) -> Array:
    """As GGUF stores a matrix: one row after the other."""
    if kind not in _RANDOM_BLOCKS:
        quantised: Array = gguf.quantize(values, kind)
        return quantised
    block, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    num_rows, width = values.shape
    generator = np.random.default_rng(values.size)
    blocks = generator.integers(0, 256, (num_rows * width // block, num_bytes), np.uint8)
    for at, scale in _RANDOM_BLOCKS[kind].items():
        blocks[:, at : at + 2] = np.frombuffer(np.float16(scale).tobytes(), np.uint8)
    return blocks.reshape(num_rows, -1)


def _permute(stored: Array, num_heads: int) -> Array:
    """llama.cpp rotates neighbouring rows of a head, the transformers library its two halves."""
    halves = stored.reshape(num_heads, 2, -1, stored.shape[1])
    return halves.swapaxes(1, 2).reshape(stored.shape)


def _frequency_factors(model: Any, head_dim: int) -> Array:
    """How Llama 3 files carry their rope scaling: what every frequency is divided by."""
    plain = model.config.rope_parameters["rope_theta"] ** (-torch.arange(0, head_dim, 2) / head_dim)
    factors: Array = (plain / model.model.rotary_emb.inv_freq).numpy()
    return factors
