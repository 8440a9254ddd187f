"""CUDA graphs: chunks that are recorded once and replayed, and when that pays."""
