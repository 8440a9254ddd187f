"""Kernels that ship compiled: how one is named, and where its PTX is read from. Imports no Triton."""
