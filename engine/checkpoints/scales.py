"""Make quantised weights floats with the scales stored next to them, once; the scales are removed."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

import torch

from ..network.codes import Codes
from .forms import FORMS, PADDED, PARTS, Stored, codes_of
from .reading import check_finite, failure
from .safetensors_file import FP8

# One of these is stored with `layer.weight`; activation scales and markers have no meaning for a float network.
_WEIGHT_SCALES = ("scale_weight", "weight_scale")
#: Name of JSON bytes that describe how ComfyUI stored a layer's weight.
_TOLD = "comfy_quant"
_IGNORED = ("scale_input", "input_scale", _TOLD)
_MARKER = "scaled_fp8"
#: What may lie in a layer besides, and parts of other layers inside it.
_PLAIN = (".weight", ".bias")
#: ComfyUI's names of fp8 with one scale: bytes in their place are the same values.
_FP8 = {str(kind).removeprefix("torch."): kind for kind in FP8}
#: Endings of names next to or in place of a weight in other programs' formats: bitsandbytes, GPTQ and AWQ, Nunchaku,
#: quanto, and ComfyUI's with scales of scales.
_PACKED = (
    ".weight.absmax", ".weight.quant_map", ".SCB", ".qweight", ".qzeros", ".wscales", ".weight._data", ".weight._scale",
    ".weight_packed", ".weight_s_rel", ".weight_s_channel", ".weight_zeros", ".weight_zero", ".weight_scale_2",
)  # fmt: skip


def quantised(names: Iterable[str]) -> bool:
    """Return True if tensors of these names are scales of codes, or say how codes are stored."""
    return any(name.rpartition(".")[2] in (*_WEIGHT_SCALES, _TOLD, "weight_s_rel") for name in names)


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
    told_of: Mapping[str, Mapping[str, object]] | None = None, dtype: torch.dtype = torch.float32,
    codes: dict[str, Codes] | None = None,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """Replace each quantised weight by its values and drop what lies beside it; return `tensors`.

    fp8 weights are multiplied by their scale (per tensor or per output channel), in float32; those of ComfyUI's other
    forms (`forms.py`) are computed in float32. A scale next to any other type means a packed format that only looks
    like weights.

    Args:
        fp8_names: the tensors that were stored as fp8.
        told_of: the result of `told_by`, for weights without a description of their own.
        dtype: the type of weights of ComfyUI's other forms.
        codes: takes the codes of weights that products can multiply as they are.

    Raises:
        CheckpointError: a form that is not supported, or a damaged one; it names the weight.
    """
    scaled = set(fp8_names)
    for weight in [name for name in tensors if name.endswith(".weight")]:
        layer = weight.removesuffix(".weight")
        told = _told(tensors.get(f"{layer}.{_TOLD}"), weight, path) or (told_of or {}).get(weight, {})
        form = str(told.get("format", ""))
        if form in _FP8:
            if tensors[weight].dtype == torch.uint8:
                tensors[weight] = tensors[weight].view(_FP8[form]).half()
                scaled.add(weight)
        elif form in FORMS:
            stored = _stored(tensors, layer, told, path)
            tensors[weight] = _dequantised(stored, tensors.get(f"{layer}.bias"), form).to(dtype)
            if codes is not None and (found := codes_of(stored)) is not None:
                codes[weight] = found
            check_finite(weight, tensors[weight], path)
            scaled.add(weight)
        elif form:
            raise failure(path, f"{weight} is in the form {form}, which is not supported ({', '.join([*_FP8, *FORMS])} "
                                "and GGUF are): take the file in 8 or 16 bit")  # fmt: skip
    packed = next((name for name in tensors if name.endswith(_PACKED)), None)
    if packed is not None:
        raise failure(path, f"{packed} is of a weight packed in a way that is not supported (fp8, ComfyUI's forms and "
                            "GGUF are): take the file in 16 bit")  # fmt: skip
    for name in list(tensors):
        layer, _, leaf = name.rpartition(".")
        if leaf not in _WEIGHT_SCALES:
            continue
        weight = f"{layer}.weight"
        if weight not in scaled:
            raise failure(path, f"tensor {weight} is quantised in a way that is not supported (fp8, ComfyUI's forms "
                                "and GGUF are): take the file in 16 bit")  # fmt: skip
        tensors[weight] = _scaled(tensors[weight], tensors.pop(name), weight, path)
        check_finite(weight, tensors[weight], path)
    for name in list(tensors):
        layer, _, leaf = name.rpartition(".")
        if name == _MARKER or leaf == _MARKER or (leaf in _IGNORED and f"{layer}.weight" in scaled):
            del tensors[name]
    _refuse_other_scales(tensors, scaled, path)
    return tensors


def _refuse_other_scales(tensors: Iterable[str], scaled: Collection[str], path: Path) -> None:
    """Refuse 8-bit weights next to a tensor of unknown meaning: most likely a scale under another program's name."""
    for name in tensors:
        parts = name.split(".")
        owner = next((w for i in range(1, len(parts)) if (w := ".".join((*parts[:i], "weight"))) in scaled), None)
        if owner is not None and not name.endswith(_PLAIN):
            raise failure(path, f"{name} lies beside the 8-bit weight {owner}: a scale in a form that is not "
                                "supported (fp8 with weight_scale, ComfyUI's forms and GGUF are); take the file in "
                                "16 bit")  # fmt: skip


def _stored(tensors: dict[str, torch.Tensor], layer: str, told: Mapping[str, object], path: Path) -> Stored:
    """Return a layer's weight as it lies in the file, and take what lies beside it out of `tensors`."""
    parts = {part: tensors.pop(f"{layer}.{part}") for part in PARTS if f"{layer}.{part}" in tensors}
    return Stored(f"{layer}.weight", tensors[f"{layer}.weight"], told, parts, path)


def _dequantised(stored: Stored, bias: torch.Tensor | None, form: str) -> torch.Tensor:
    """Return the values of a layer's weight without padded rows."""
    values = FORMS[form](stored)
    spare = len(values) - len(bias) if bias is not None and bias.dim() == 1 else 0
    return values[: len(bias)] if 0 < spare < PADDED.get(form, 1) else values


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
