"""The result of reading a weight file."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch

from ..network.codes import Codes


@dataclass
class Checkpoint:
    """Tensors by their own names (uniform prefix removed, 5-D shapes restored) and the file's metadata.

    `tensors` hold the stored float type (block-quantised GGUF tensors arrive as float32, see dequantize.py);
    `metadata` has safetensors' strings, or a GGUF file's key/value pairs. `codes` has the 8-bit codes that floats were
    made of, by the weight's name, where products can multiply them as they are.
    """

    tensors: dict[str, torch.Tensor]
    metadata: dict[str, object] = field(default_factory=dict)
    path: Path | None = None
    codes: dict[str, Codes] = field(default_factory=dict)
