"""Precisions: which convolutions read 8-bit operands, and their scales."""
