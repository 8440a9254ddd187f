"""Choose chunks, steps, tiles and parking that keep a run below a memory target, and compute the memory they need."""
