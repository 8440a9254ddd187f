"""Choose the type of each tensor of a VAE, and encode it."""

from __future__ import annotations

import re
from math import prod

import numpy as np
import torch
from torch import Tensor

from ...checkpoints.gguf_types import GGUFType, named, package, types
from . import kquants

# The choices of `convert --type`, in descending order of size.
TYPES = (
    "f32", "f16", "bf16", "q8_0", "q6_k", "q5_1", "q5_k", "q5_0", "q4_1", "q4_k", "q4_0", "q3_k", "q2_k",
)  # fmt: skip
PLAIN = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
# A K type needs 256 values per block; a tensor that divides only by 32 gets a type of 32 with at least its precision.
_FALLBACK = {"Q6_K": "Q8_0", "Q5_K": "Q5_1", "Q4_K": "Q5_0", "Q3_K": "Q4_0", "Q2_K": "Q4_0"}
# First and last convolutions, the 1x1x1 ones at the latent, and time embeddings: few weights, large effect.
_SENSITIVE = re.compile(
    r"(^|\.)(conv_in|conv_out|quant_conv|post_quant_conv|head\.2|output_proj|\w*time\w*embed\w*)(\.|$)"
    r"|^((encoder|decoder)\.)?conv[12]\.weight$"
    r"|^(decoder\.)?blocks\.0\.0\.|^(encoder\.)?layers\.0\."
)
# Values encoded at a time; a multiple of every block.
CHUNK = 1 << 19


def is_weight(name: str, shape: tuple[int, ...]) -> bool:
    """Return whether a tensor is a convolution's or linear layer's weight (norms may be stored as [C, 1, 1, 1])."""
    return name.endswith(".weight") and sum(n > 1 for n in shape) >= 2


def stored_type(name: str, tensor: Tensor, kind: str) -> GGUFType:
    """Return the type in which `tensor` is stored when a file is converted to `kind` (one of TYPES).

    Plain kinds: weights take the kind, and with f32 every float does. Block kinds: weights take it if it divides them,
    except the sensitive ones. Everything else keeps its stored type.
    """
    own = {t.dtype: t for t in types().values()}[tensor.dtype]
    wanted = named(kind.upper())
    if tensor.is_floating_point() and wanted.dtype == torch.float32:
        return wanted
    if not tensor.is_floating_point() or not is_weight(name, tuple(tensor.shape)):
        return own
    if wanted.block == 1:
        return wanted
    if _SENSITIVE.search(name):
        return own
    count = tensor.numel()
    if count % wanted.block:
        wanted = named(_FALLBACK.get(wanted.name, wanted.name))
    return wanted if count % wanted.block == 0 else own


def stored_shape(shape: tuple[int, ...], type_: GGUFType) -> tuple[int, ...]:
    """Return the shape in the file: convolutions (last size 3 or 1) become long rows, so that blocks divide them."""
    if type_.block == 1 or (len(shape) <= 4 and shape[-1] % type_.block == 0):
        return shape
    count = prod(shape)
    row = kquants.BLOCK if count % kquants.BLOCK == 0 else type_.block
    return (count // row, row)


def encode(tensor: Tensor, type_: GGUFType) -> Tensor:
    """Return the tensor's bytes (uint8) in `type_`."""
    if type_.dtype is not None:
        return tensor.to(type_.dtype).contiguous().reshape(-1).view(torch.uint8)
    flat = tensor.reshape(-1)
    out = np.empty(type_.nbytes(flat.numel()), dtype=np.uint8)
    for start in range(0, flat.numel(), CHUNK):
        part = flat[start : start + CHUNK].float().numpy()
        out[type_.nbytes(start) : type_.nbytes(start + part.size)] = _encode_blocks(part, type_)
    return torch.from_numpy(out)


def _encode_blocks(values: np.ndarray, type_: GGUFType) -> np.ndarray:
    if type_.name in kquants.ENCODERS:
        return kquants.quantize(values, type_.name)
    gguf = package()
    with np.errstate(all="ignore"):  # 1 / 0 for all-zero blocks
        return gguf.quants.quantize(values.reshape(1, -1), gguf.GGMLQuantizationType[type_.name])[0]
