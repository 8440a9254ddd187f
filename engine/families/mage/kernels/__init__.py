"""Operators of this family alone."""
