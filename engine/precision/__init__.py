"""Precisions: which convolutions read 8-bit operands, their scales, packed weights and the store of both."""
