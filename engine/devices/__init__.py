"""One call on several devices: of this process, or of torchrun's ranks."""
