"""Kernels of consumer cards on an H100 or H200 whose products are slowed to such a card's rate: `bench --ratio`."""

from .run import PLAIN, Ratio, ratio_of, refuse_fp8

__all__ = ["PLAIN", "Ratio", "ratio_of", "refuse_fp8"]
