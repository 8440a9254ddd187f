"""Multiply 8-bit weights by the scales stored next to them, once; the scales are removed."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path

import torch

from .reading import check_finite, failure

# One of these is stored with `layer.weight`; activation scales and markers have no meaning for a float network.
_WEIGHT_SCALES = ("scale_weight", "weight_scale")
#: Name of JSON bytes that describe how ComfyUI stored a layer's weight.
_TOLD = "comfy_quant"
_IGNORED = ("scale_input", "input_scale", _TOLD)
_MARKER = "scaled_fp8"
#: ComfyUI's name of int8 with one scale or one for each row, and the default number of columns in a rotated group.
_INT8, _GROUP = "int8_tensorwise", 256


#: Endings of names next to or in place of a weight in other programs' formats: bitsandbytes, GPTQ and AWQ, Nunchaku,
#: quanto, and ComfyUI's with scales of scales.
_PACKED = (
    ".weight.absmax", ".weight.quant_map", ".SCB", ".qweight", ".qzeros", ".wscales", ".weight._data", ".weight._scale",
    ".weight_packed", ".weight_s_rel", ".weight_s_channel", ".weight_zeros", ".weight_zero", ".weight_scale_2",
)  # fmt: skip


def told_by(metadata: Mapping[str, object], names: Mapping[str, str]) -> dict[str, Mapping[str, object]]:
    """Return a file's metadata on the storage of its weights, by the network's names of them.

    Args:
        metadata: of the file.
        names: {name in the file: name in the network} of the tensors that are read.
    """
    said = None
    with suppress(ValueError, RecursionError):
        said = json.loads(str(metadata.get("_quantization_metadata", "{}")))
    layers = said.get("layers") if isinstance(said, dict) else None
    if not isinstance(layers, dict):
        return {}
    found = {name: layers.get(old.removesuffix(".weight")) for old, name in names.items() if old.endswith(".weight")}
    return {name: facts for name, facts in found.items() if isinstance(facts, dict)}


def apply_scales(
    tensors: dict[str, torch.Tensor], fp8_names: Collection[str], path: Path,
    told_of: Mapping[str, Mapping[str, object]] | None = None,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """Multiply each scaled weight (per tensor or per output channel) in float32, in place of the stored one, and drop
    the scales; return `tensors`. int8 weights become float16: half the memory, and a rounding far below their own.

    A scale next to any other type, except int8 in ComfyUI's layout, means a packed format that only looks like weights;
    it is refused with CheckpointError.

    Args:
        fp8_names: the tensors that were stored as fp8.
        told_of: the result of `told_by`, for weights without a description of their own.
    """
    packed = next((name for name in tensors if name.endswith(_PACKED)), None)
    if packed is not None:
        raise failure(path, f"{packed} is of a weight packed in a way that is not supported (fp8, ComfyUI's int8 "
                            "and GGUF are): take the file in 16 bit")  # fmt: skip
    scaled = set(fp8_names)
    for name in list(tensors):
        layer, _, leaf = name.rpartition(".")
        if leaf not in _WEIGHT_SCALES:
            continue
        weight = f"{layer}.weight"
        told = _told(tensors.get(f"{layer}.{_TOLD}"), weight, path) or (told_of or {}).get(weight, {})
        int8 = weight in tensors and tensors[weight].dtype == torch.int8 and told.get("format") == _INT8
        if weight not in fp8_names and not int8:
            raise failure(path, f"tensor {weight} is quantised in a way that is not supported (fp8, ComfyUI's int8 and "
                                "GGUF are): take the file in 16 bit")  # fmt: skip
        product = _scaled(tensors[weight], tensors.pop(name), weight, path)
        tensors[weight] = _turned_back(product, told, weight, path).half() if int8 else product
        check_finite(weight, tensors[weight], path)
        scaled.add(weight)
    for name in list(tensors):
        layer, _, leaf = name.rpartition(".")
        if name == _MARKER or leaf == _MARKER or (leaf in _IGNORED and f"{layer}.weight" in scaled):
            del tensors[name]
    return tensors


def _scaled(weight: torch.Tensor, scale: torch.Tensor, name: str, path: Path) -> torch.Tensor:
    if scale.numel() == 1:
        factor = scale.float().reshape(())
    elif weight.dim() and scale.numel() == weight.shape[0]:
        factor = scale.float().reshape(-1, *[1] * (weight.dim() - 1))
    else:
        raise failure(path, f"the scale of {name} has the shape {tuple(scale.shape)}; one per tensor or row works")
    return weight.float() * factor


def _told(tensor: torch.Tensor | None, name: str, path: Path) -> Mapping[str, object]:
    """Return the file's description of a weight; empty if there is none."""
    if tensor is None:
        return {}
    told = None
    with suppress(ValueError, RecursionError):
        told = json.loads(tensor.numpy().tobytes()) if tensor.dtype == torch.uint8 else None
    if not isinstance(told, dict):
        raise failure(path, f"what it says of how {name} is quantised cannot be read; the file is damaged")
    return told


def _turned_back(weight: torch.Tensor, told: Mapping[str, object], name: str, path: Path) -> torch.Tensor:
    """Undo, for a weight [N, K], the rotation ("convrot") that spread outliers over each group of its columns before
    they were rounded: a regular Hadamard matrix, which is its own inverse."""
    params = told.get("params")
    told = {**(params if isinstance(params, dict) else {}), **told}
    if not told.get("convrot"):
        return weight
    group = told.get("convrot_groupsize", _GROUP)
    sizes = [4**i for i in range(1, 8)]
    if weight.dim() != 2 or type(group) is not int or group not in sizes or weight.shape[1] % group:
        raise failure(path, f"{name} {tuple(weight.shape)} cannot be rotated in groups of {group!r} columns: "
                            "they are powers of 4 that divide them")  # fmt: skip
    four = 0.5 - torch.eye(4).flip(0)
    turn = four
    while len(turn) < group:
        turn = torch.kron(turn, four)
    return (weight.view(len(weight), -1, group) @ turn).view(weight.shape)
