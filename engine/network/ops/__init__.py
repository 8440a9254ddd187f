"""One file per kind of step: its parameters and eager forward, its packing, its fused run, its sizes and its work."""
