"""Weights stored as fp8 with a scale beside them: multiplied out once, the scales disappear."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import torch

from .reading import check_finite, failure

# `layer.weight` is accompanied by one of these; the activation scales and markers mean nothing to a float network.
_WEIGHT_SCALES = ("scale_weight", "weight_scale")
_IGNORED = ("scale_input", "input_scale", "comfy_quant")
_MARKER = "scaled_fp8"


def apply_scales(tensors: dict[str, torch.Tensor], fp8_names: Collection[str], path: Path) -> dict[str, torch.Tensor]:
    """Multiply each scaled weight (per tensor or per output channel) in float32 and drop the scales.

    `fp8_names`: the tensors that were stored as fp8. A scale beside any other type means a packed format that only
    looks like weights; that is refused.
    """
    result = dict(tensors)
    for name in tensors:
        layer, _, leaf = name.rpartition(".")
        if leaf in _WEIGHT_SCALES:
            weight = f"{layer}.weight"
            if weight not in fp8_names:
                raise failure(path, f"tensor {weight} is quantised in a way that is not supported (fp8 and GGUF are): "
                                    "take the file in 16 bit")
            result[weight] = _scaled(result[weight], result.pop(name), weight, path)
        elif name == _MARKER or leaf == _MARKER or (leaf in _IGNORED and f"{layer}.weight" in fp8_names):
            del result[name]
    return result


def _scaled(weight: torch.Tensor, scale: torch.Tensor, name: str, path: Path) -> torch.Tensor:
    if scale.numel() == 1:
        factor = scale.float().reshape(())
    elif weight.dim() and scale.numel() == weight.shape[0]:
        factor = scale.float().reshape(-1, *[1] * (weight.dim() - 1))
    else:
        raise failure(path, f"the fp8 scale of {name} has the shape {tuple(scale.shape)}; one per tensor or row works")
    product = weight.float() * factor
    check_finite(name, product, path)
    return product
