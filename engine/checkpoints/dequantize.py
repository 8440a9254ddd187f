"""Read GGUF tensor data into torch: plain types as they are stored, block types decoded once to float32."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch

from .gguf_header import TensorInfo
from .gguf_types import package
from .reading import allocate, check_finite, failure, not_finite, read_into, read_tensor_bytes

# Elements decoded per call, as one long row: the library's loop over groups of 16 rows costs up to 5x on 256-wide
# rows. 2^16 keeps its temporaries in cache: 250 M parameters of Q4_K take a third less time than with 2^18. A multiple
# of every block size.
CHUNK_ELEMENTS = 1 << 16


def read_tensor(file: BinaryIO, info: TensorInfo, path: Path) -> torch.Tensor:
    """Return the tensor in its stored type (F32, F16, BF16, F64, I*) or float32 (block types), finite, in stored
    shape."""
    what = f"tensor {info.name}"
    if info.type.dtype is not None:
        raw = read_tensor_bytes(file, info.offset, info.nbytes, path, what)
        tensor = raw.view(info.type.dtype).reshape(info.shape)
        check_finite(info.name, tensor, path)
        return tensor
    return _decode_blocks(file, info, path, what)


def _decode_blocks(file: BinaryIO, info: TensorInfo, path: Path, what: str) -> torch.Tensor:
    gguf = package()
    result = allocate(info.shape, torch.float32, path, what)
    flat = result.view(-1).numpy()
    buffer = np.empty(info.type.nbytes(min(CHUNK_ELEMENTS, flat.size)), dtype=np.uint8)
    for start in range(0, flat.size, CHUNK_ELEMENTS):
        stop = min(start + CHUNK_ELEMENTS, flat.size)
        raw = buffer[: info.type.nbytes(stop - start)]
        read_into(file, info.offset + info.type.nbytes(start), memoryview(raw), path, what)
        try:
            with np.errstate(all="ignore"):  # hostile scales overflow
                values = gguf.quants.dequantize(raw.reshape(1, -1), gguf.GGMLQuantizationType(info.type.id))[0]
                finite = np.isfinite(values.min()) and np.isfinite(values.max())  # both propagate NaN
        except NotImplementedError as error:
            cure = "update it (pip install -U gguf)"
            raise failure(path, f"{what}: the installed gguf package cannot decode {info.type.name}; {cure}") from error
        if not finite:
            raise not_finite(info.name, path)
        flat[start:stop] = values
    return result
