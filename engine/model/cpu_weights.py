"""A model's weights in the forms that the CPU kernels take."""

import numpy as np
import numpy.typing as npt
import torch

from engine.errors import ModelError
from engine.kernels import cpu
from engine.model.layer_weights import LayerWeights, load_layer, stored_bits
from engine.weights.checkpoint import Checkpoint

Array = npt.NDArray[np.generic]
_NOTHING = torch.empty(0)


def pack_weights(
    checkpoint: Checkpoint, embedding: torch.Tensor, dtype: torch.dtype, weights: str
) -> cpu.DecoderWeights:
    """The matrices are, by `weights`,

    dtype  of this dtype, float32 or bfloat16
    int8   of 8 bits, or the 4 that the file has them in, and multiplied with rows of 8 bits
    auto   of the few bits that the file has them in, and multiplied with rows of 16 bits, which are more
           exact than bfloat16; else of this dtype

    Layer after layer into stacked arrays, so that only one layer is ever held twice.
    """
    config = checkpoint.config
    form = _Form(dtype, weights)
    bits = stored_bits(checkpoint)
    in_4_bits = {matrix for matrix in bits if bits[matrix] == 4 and form.keeps_few_bits}

    def packed(index: int) -> tuple[Array, ...]:
        return _pack_layer(load_layer(checkpoint, index, in_4_bits), form, bits)

    first = packed(0)
    stacked = [np.empty((config.num_layers, *part.shape), part.dtype) for part in first]
    for index in range(config.num_layers):
        layer = packed(index) if index else first
        for target, part in zip(stacked, layer, strict=True):
            target[index] = part
    final_norm = checkpoint.tensor("model.norm.weight", (config.hidden_size,)).numpy()
    head = _pack_head(checkpoint, embedding, form)
    return cpu.DecoderWeights._make([_bits(embedding, dtype), *stacked, final_norm, head])


class _Form:
    """What becomes of matrices."""

    def __init__(self, dtype: torch.dtype, weights: str) -> None:
        self.keeps_few_bits = weights == "int8" or (weights == "auto" and dtype == torch.bfloat16)
        self._all_in_8_bits = weights == "int8"
        self._row_bits = 8 if weights == "int8" else 16
        self._dtype = dtype

    def pack(self, weight: torch.Tensor, stored_bits: int | None) -> cpu.PackedWeight:
        """A matrix that the file has in so many bits, as `load_layer` gives it."""
        if weight.dtype == torch.uint8:
            return cpu.pack_weight_int4(weight.numpy(), self._row_bits)
        if self._all_in_8_bits or (self.keeps_few_bits and stored_bits == 8):
            try:
                return cpu.pack_weight_int8(weight.numpy(), self._row_bits)
            except ValueError as error:
                raise ModelError(f"--weights int8: {error}") from error
        return cpu.pack_weight(_bits(weight, self._dtype))


def _bits(weight: torch.Tensor, dtype: torch.dtype) -> npt.NDArray[np.float32] | npt.NDArray[np.uint16]:
    """As float32, or the bits of bfloat16."""
    return weight.numpy() if dtype == torch.float32 else weight.to(torch.bfloat16).view(torch.uint16).numpy()


def _pack_layer(layer: LayerWeights, form: _Form, bits: dict[str, int]) -> tuple[Array, ...]:
    """In the order of DecoderWeights' layer fields."""

    def optional(part: torch.Tensor | None) -> npt.NDArray[np.float32]:
        return (_NOTHING if part is None else part).numpy()

    def matrix(name: str, weight: torch.Tensor) -> cpu.PackedWeight:
        return form.pack(weight, bits.get(name))

    return (
        layer.input_norm.numpy(),
        matrix("qkv", layer.qkv),
        optional(layer.qkv_bias),
        optional(layer.q_norm),
        optional(layer.k_norm),
        matrix("output", layer.output),
        layer.post_norm.numpy(),
        matrix("gate_up", torch.from_numpy(cpu.pair_gate_up(layer.gate_up.numpy()))),
        matrix("down", layer.down),
    )


def _pack_head(checkpoint: Checkpoint, embedding: torch.Tensor, form: _Form) -> cpu.PackedWeight:
    config = checkpoint.config
    name = "model.embed_tokens.weight" if config.tie_embeddings else "lm_head.weight"
    shape, bits = (config.vocab_size, config.hidden_size), checkpoint.stored_bits(name)
    if bits == 4 and form.keeps_few_bits:
        return form.pack(checkpoint.tensor_4_bits(name, shape), bits)
    return form.pack(embedding if config.tie_embeddings else checkpoint.tensor(name, shape), bits)
