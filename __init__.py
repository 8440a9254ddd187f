"""ZeroWaste VAE: exact, fast and memory-predictable video VAE decoding and encoding."""

__version__ = "0.1.0"
