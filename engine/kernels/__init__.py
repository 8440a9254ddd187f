"""Operators of the fused walk: each runs Triton where the GPU has it and plain torch elsewhere, same result."""
