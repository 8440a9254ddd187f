"""Which chunks, steps, tiles and parking keep a run below a memory target, and what they take."""
