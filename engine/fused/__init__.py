"""The networks on the fused operators of engine/kernels: no concatenation, no padding pass, no layout change."""
