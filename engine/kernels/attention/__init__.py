"""Single-head attention with large heads."""

from .dispatch import attention, scratch_bytes, torch_bytes

__all__ = ["attention", "scratch_bytes", "torch_bytes"]
