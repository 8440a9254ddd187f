"""The choice of convolutions that read 8-bit operands, and the storage of these operands, for packing a network."""
