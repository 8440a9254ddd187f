"""Networks as data: a Program lists the steps of an encoder or decoder; all else is derived from it.

program.py   what a Program and a Step are     ops/        one file per kind of step
plain.py     parameters and the walk with a State, on PyTorch's own operators
fused.py     the walk with a Run, on the operators of engine/kernels, dry for plans or for real; chain.py: its steps one
             after the other and where their results lie; packed.py: weights as these operators read them
tree.py      modules under the dotted names of a file
"""
