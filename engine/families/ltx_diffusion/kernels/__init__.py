"""Operators of this family's decoder alone."""
