"""Operators of the fused execution: each runs a kernel where the GPU has one and plain torch elsewhere, same result."""
