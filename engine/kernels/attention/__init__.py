"""Single-head attention with large heads."""

from .dispatch import attention

__all__ = ["attention"]
