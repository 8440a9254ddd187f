"""Measure what 8-bit operands cost each convolution, choose those of a clip, and keep both, and packed weights."""
