"""Dequantise linear layers' weights that ComfyUI stores as codes with scales, in float32, without further rounding."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..errors import one_line
from ..kernels.tokens import hadamard
from ..network.codes import Codes
from .reading import failure
from .safetensors_file import power_of_two

#: Columns of a rotated group where a file does not give their number.
_GROUP = 256
#: Rows and columns of a tile of scales, and columns that share a scale.
_TILE_ROWS, _TILE_COLUMNS, _MX_BLOCK, _NV_BLOCK, _REL_BLOCK = 128, 4, 32, 16, 16
#: Values of nvfp4's codes without their sign.
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class Stored:
    """A weight as it lies in a file.

    Args:
        name: of the weight.
        codes: the stored tensor [rows, stored columns].
        facts: the file's description of it.
        parts: {last part of the name: tensor} of what lies beside it.
        path: of the file, for messages.
    """

    name: str
    codes: Tensor
    facts: Mapping[str, object]
    parts: Mapping[str, Tensor]
    path: Path

    def part(self, name: str, *shape: int, kind: torch.dtype | None = None) -> Tensor:
        """Return in float32 what lies beside the weight under this name, in this shape.

        Args:
            kind: the type that bytes (uint8) stand for; None: the tensor holds numbers.

        Raises:
            CheckpointError: it is missing or of another size.
        """
        found = self.parts.get(name)
        if found is None:
            raise failure(self.path, f"{self.name} is in the form {self.facts['format']}, but its {name} is missing; "
                                     "download the file again")  # fmt: skip
        if found.numel() != torch.Size(shape).numel():
            raise self.wrong(f"its {name} has the shape {tuple(found.shape)} where {shape} is needed")
        return _floats(found, kind).reshape(shape)

    def wrong(self, why: str) -> Exception:
        """Return the error of a weight that its form does not fit."""
        return failure(self.path, f"{self.name} is not of the form {self.facts['format']}: {why}")

    def matrix(self, *kinds: torch.dtype) -> Tensor:
        """Return the codes. Raises CheckpointError unless they are a matrix of one of these types."""
        if self.codes.dim() != 2 or not self.codes.numel() or self.codes.dtype not in kinds:
            shape, kind = tuple(self.codes.shape), str(self.codes.dtype).removeprefix("torch.")
            raise self.wrong(f"it is stored as {kind} {shape}")
        return self.codes

    def fact(self, name: str, absent: object = None) -> object:
        """Return a fact of the description; those within `params` count less."""
        params = self.facts.get("params")
        return {**(params if isinstance(params, dict) else {}), **self.facts}.get(name, absent)

    def turned_back(self, weight: Tensor) -> Tensor:
        """Undo the rotation ("convrot") that spread outliers over each group of columns of a weight [N, K] before they
        were rounded: a regular Hadamard matrix, which is its own inverse.

        Rows' scales come after it: sums of whole numbers up to 127 are exact, the same on every machine.
        """
        group = self.fact("convrot_groupsize", _GROUP)
        sizes = [4**i for i in range(1, 8)]
        if type(group) is not int or group not in sizes or weight.shape[1] % group:
            raise failure(self.path, f"{self.name} {tuple(weight.shape)} cannot be rotated in groups of "
                                     f"{one_line(repr(group), 40)} columns: they are powers of 4 that divide "
                                     "them")  # fmt: skip
        return (weight.view(len(weight), -1, group) @ hadamard(group)).view(weight.shape)


def _int8(stored: Stored) -> Tensor:
    codes = stored.matrix(torch.int8)
    values = stored.turned_back(codes.float()) if stored.fact("convrot") else codes.float()
    return values * _row_scales(stored)


def _row_scales(stored: Stored) -> Tensor:
    scale = stored.parts.get("weight_scale")
    return stored.part("weight_scale", 1 if scale is not None and scale.numel() == 1 else len(stored.codes), 1)


def codes_of(stored: Stored) -> Codes | None:
    """Return the codes of a weight that `int8_tensorwise` holds; None where the file asks for products of floats."""
    if stored.facts["format"] != "int8_tensorwise" or stored.fact("full_precision_matrix_mult"):
        return None
    scales = _row_scales(stored).flatten().expand(len(stored.codes)).contiguous()
    return Codes(stored.codes, scales, stored.fact("convrot_groupsize", _GROUP) if stored.fact("convrot") else 0)


def _mxfp8(stored: Stored) -> Tensor:
    codes = _floats(stored.matrix(torch.float16, torch.uint8), torch.float8_e4m3fn)
    return _in_blocks(codes, _tiled(stored, codes, _MX_BLOCK, None), _MX_BLOCK)


def _nvfp4(stored: Stored) -> Tensor:
    values = torch.tensor([*_E2M1, *(-v for v in _E2M1)], dtype=torch.float32, device="cpu")
    codes = values[_nibbles(stored.matrix(torch.uint8)).flip(2).flatten(1).int()]
    scale = stored.part("weight_scale_2") * _tiled(stored, codes, _NV_BLOCK, torch.float8_e4m3fn)
    weight = _in_blocks(codes, scale, _NV_BLOCK)
    before = stored.parts.get("pre_quant_scale")
    if before is None:
        return weight
    # The layer's input is multiplied by it: as well the weight's columns. It has as many as there were before padding.
    if before.numel() > weight.shape[1]:
        raise stored.wrong(f"its pre_quant_scale has {before.numel()} values for {weight.shape[1]} columns")
    return weight[:, : before.numel()] * before.float().flatten()


def _w4a4(stored: Stored) -> Tensor:
    codes = _nibbles(stored.matrix(torch.int8)).flatten(1).to(torch.int8)
    signed = codes - 16 * (codes > 7).to(torch.int8)
    return stored.turned_back(signed.float()) * stored.part("weight_scale", len(codes), 1)


def _w4a8(stored: Stored) -> Tensor:
    packed, relative = stored.matrix(torch.int8), stored.parts.get("weight_s_rel")
    columns = 2 * packed.shape[1]
    if relative is not None and relative.numel() * _REL_BLOCK * 3 == packed.numel() * 4:
        raise failure(stored.path, f"{stored.name} is in the form asym_w4a8_int8 with codes of 6 bits, which is not "
                                   "supported: take the file in 8 or 16 bit")  # fmt: skip
    codes = _nibbles(packed).flatten(1)
    coarse = stored.part("weight_s_rel", len(packed), columns // _REL_BLOCK, kind=torch.float8_e4m3fn)
    book = torch.arange(-8.0, 8.0, dtype=torch.float32, device="cpu")
    if "weight_codebook" in stored.parts:
        book = stored.part("weight_codebook", 16)
    if columns % _REL_BLOCK:
        raise stored.wrong(f"its {columns} columns are no blocks of {_REL_BLOCK}")
    whole = _in_blocks(book[codes.int()], coarse, _REL_BLOCK).round_().clamp_(-127, 127)
    return stored.turned_back(whole) * stored.part("weight_s_channel", len(packed), 1)


#: Each form's dequantisation to float32, with padded rows.
FORMS: dict[str, Callable[[Stored], Tensor]] = {
    "int8_tensorwise": _int8, "mxfp8": _mxfp8, "nvfp4": _nvfp4, "convrot_w4a4": _w4a4, "asym_w4a8_int8": _w4a8,
}  # fmt: skip
#: Forms with padded rows, and to a multiple of how many.
PADDED = {"mxfp8": 32, "nvfp4": 16}
#: What may lie beside a weight of these forms.
PARTS = (
    "weight_scale", "weight_scale_2", "pre_quant_scale", "weight_s_rel", "weight_s_channel", "weight_codebook",
)  # fmt: skip


def _floats(tensor: Tensor, kind: torch.dtype | None) -> Tensor:
    """Return a tensor in float32, bytes (uint8) as what they stand for."""
    return (tensor.view(kind) if kind is not None and tensor.dtype == torch.uint8 else tensor).float()


def _nibbles(packed: Tensor) -> Tensor:
    """Return the halves of each byte [N, K] as uint8 [N, K, 2], the low one first."""
    raw = packed.view(torch.uint8)
    return torch.stack((raw & 15, raw >> 4), 2)


def _in_blocks(weight: Tensor, scale: Tensor, block: int) -> Tensor:
    """Return a weight [N, K] times a scale [N, K / block] for each block of columns."""
    return (weight.view(len(weight), -1, block) * scale[..., None]).view(weight.shape)


def _tiled(stored: Stored, weight: Tensor, block: int, kind: torch.dtype | None) -> Tensor:
    """Return the scales [N, K / block] of a weight [N, K], which lie in tiles of 128 x 4 in the order of cuBLAS: a
    tile's scale (r, c) is number (r mod 32) * 16 + (r div 32) * 4 + c.

    Args:
        kind: the type of scales that are stored as bytes; None: powers of two.
    """
    n, k = weight.shape
    if k % block:
        raise stored.wrong(f"its {k} columns are no blocks of {block}")
    rows, columns = -(-n // _TILE_ROWS), -(-(k // block) // _TILE_COLUMNS)
    found = stored.parts.get("weight_scale")
    if kind is None and found is not None and found.dtype == torch.uint8:
        stored = Stored(stored.name, stored.codes, stored.facts, {"weight_scale": power_of_two(found)}, stored.path)
    scale = stored.part("weight_scale", rows * _TILE_ROWS, columns * _TILE_COLUMNS, kind=kind)
    tiles = scale.view(rows, columns, 32, _TILE_ROWS // 32, _TILE_COLUMNS)
    return tiles.permute(0, 3, 2, 1, 4).reshape(rows * _TILE_ROWS, -1)[:n, : k // block]
