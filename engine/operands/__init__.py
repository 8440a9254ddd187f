"""Which convolutions read 8-bit operands, and how those are stored: what packing a network is told."""
