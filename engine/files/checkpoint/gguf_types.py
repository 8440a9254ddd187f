"""The tensor types a GGUF file may hold (ids and block sizes are fixed by ggml)."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class GGUFType:
    """`block` elements take `block_bytes` bytes. `dtype` is set for plain types, None for block-quantised ones."""

    id: int
    name: str
    block: int
    block_bytes: int
    dtype: torch.dtype | None = None

    def nbytes(self, count: int) -> int:
        return count // self.block * self.block_bytes


TYPES: dict[int, GGUFType] = {
    t.id: t
    for t in (
        GGUFType(0, "F32", 1, 4, torch.float32),
        GGUFType(1, "F16", 1, 2, torch.float16),
        GGUFType(30, "BF16", 1, 2, torch.bfloat16),
        GGUFType(28, "F64", 1, 8, torch.float64),
        GGUFType(24, "I8", 1, 1, torch.int8),
        GGUFType(25, "I16", 1, 2, torch.int16),
        GGUFType(26, "I32", 1, 4, torch.int32),
        GGUFType(27, "I64", 1, 8, torch.int64),
        GGUFType(2, "Q4_0", 32, 18),
        GGUFType(3, "Q4_1", 32, 20),
        GGUFType(6, "Q5_0", 32, 22),
        GGUFType(7, "Q5_1", 32, 24),
        GGUFType(8, "Q8_0", 32, 34),
        GGUFType(10, "Q2_K", 256, 84),
        GGUFType(11, "Q3_K", 256, 110),
        GGUFType(12, "Q4_K", 256, 144),
        GGUFType(13, "Q5_K", 256, 176),
        GGUFType(14, "Q6_K", 256, 210),
        GGUFType(16, "IQ2_XXS", 256, 66),
        GGUFType(17, "IQ2_XS", 256, 74),
        GGUFType(18, "IQ3_XXS", 256, 98),
        GGUFType(19, "IQ1_S", 256, 50),
        GGUFType(20, "IQ4_NL", 32, 18),
        GGUFType(21, "IQ3_S", 256, 110),
        GGUFType(22, "IQ2_S", 256, 82),
        GGUFType(23, "IQ4_XS", 256, 136),
        GGUFType(29, "IQ1_M", 256, 56),
        GGUFType(34, "TQ1_0", 256, 54),
        GGUFType(35, "TQ2_0", 256, 66),
        GGUFType(39, "MXFP4", 32, 17),
        GGUFType(40, "NVFP4", 64, 36),
    )
}
BY_NAME: dict[str, GGUFType] = {t.name: t for t in TYPES.values()}

# Ids that exist or existed but cannot be decoded here, with the reason for the error message.
REFUSED: dict[int, str] = {
    4: "Q4_2 was removed from the format",
    5: "Q4_3 was removed from the format",
    9: "Q8_1 is an intermediate type without a decoder",
    15: "Q8_K is an intermediate type without a decoder",
    31: "Q4_0_4_4 was removed from the format",
    32: "Q4_0_4_8 was removed from the format",
    33: "Q4_0_8_8 was removed from the format",
    36: "IQ4_NL_4_4 was removed from the format",
    37: "IQ4_NL_4_8 was removed from the format",
    38: "IQ4_NL_8_8 was removed from the format",
    41: "Q1_0 has no decoder",
}
