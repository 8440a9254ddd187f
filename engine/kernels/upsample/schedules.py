"""The composed kernels are convolutions with eight (or four) output phases: they take the convolution's schedules."""

from ..conv3d.schedules import pick

__all__ = ["pick"]
