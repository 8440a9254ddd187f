"""Kinds of steps: their parameters and eager forward, their packing, their fused run, their sizes and their work."""
