"""The kernel is the convolution's own: phases shift the taps and interleave the store."""

from ..conv3d.triton import conv_kernel

__all__ = ["conv_kernel"]
