"""8-bit operands and fp16 sums: which convolutions take them, how they are scaled, and what that costs in dB."""
