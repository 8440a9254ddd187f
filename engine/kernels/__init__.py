"""Operators of the fused path: each runs Triton where the GPU has it and plain torch elsewhere, same result."""
