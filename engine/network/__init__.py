"""Networks as data: a Program lists the steps of an encoder or decoder; everything else is derived from it.

program.py   Program and Step                   ops/        kinds of steps
architecture.py: what a family tells of itself, with the Programs of its networks
plain.py     parameters, and eager execution with a State on PyTorch's own operators
fused.py     execution with an ExecutionContext on the operators of engine/kernels, dry for plans or for real; chain.py:
its steps one
             after the other and the place of their results; packed.py: weights as these operators read them
tree.py      modules under the dotted names of a file
"""
