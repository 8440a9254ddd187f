"""Measure what 8-bit operands cost each convolution, and choose those of a clip."""
