"""Arrays that travel to the device together, in one copy."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Array = npt.NDArray[Any]
_ALIGNMENT = 16


class PackedArrays:
    """Memory for arrays of these shapes and types; `tensors` are they on the device."""

    def __init__(self, arrays: Sequence[Array], device: torch.device) -> None:
        sizes = [-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays]
        starts = np.cumsum([0, *sizes])
        pinned = device.type == "cuda"
        self._host = torch.empty(int(starts[-1]), dtype=torch.uint8, pin_memory=pinned)
        self._device = torch.empty_like(self._host, device=device, pin_memory=False)
        host = self._host.numpy()
        self._views: list[Array] = []
        self.tensors: list[torch.Tensor] = []
        for array, start in zip(arrays, starts[:-1], strict=True):
            span = slice(int(start), int(start) + array.nbytes)
            self._views.append(host[span].view(array.dtype).reshape(array.shape))
            kind = torch.from_numpy(np.empty(0, array.dtype)).dtype
            self.tensors.append(self._device[span].view(kind).view(array.shape))

    def send(self, arrays: Sequence[Array]) -> None:
        """Queues the copy on the current stream; the one before must have come to its end.

        Of a smaller array than there is memory for, what lies beyond is undefined.
        """
        for view, array in zip(self._views, arrays, strict=True):
            view[tuple(slice(0, n) for n in array.shape)] = array
        self._device.copy_(self._host, non_blocking=True)
