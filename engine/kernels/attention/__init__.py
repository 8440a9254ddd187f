"""Single-head attention with large heads."""

from .op import FLASH_HEAD, attention, scratch_bytes, torch_bytes

__all__ = ["FLASH_HEAD", "attention", "scratch_bytes", "torch_bytes"]
