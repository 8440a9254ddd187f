"""One file per kind of step: its parameters and plain forward, its packing, its run, its sizes and its work."""
