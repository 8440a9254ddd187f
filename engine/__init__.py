"""The engine: reads weight files, runs the networks within a memory target. Never imports comfy."""
