"""Write weight files, plain or block-quantised."""

from .convert import convert_checkpoint, save_checkpoint

__all__ = ["convert_checkpoint", "save_checkpoint"]
