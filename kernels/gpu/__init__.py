"""The operators in Triton: one file each, jit kernels first, then the launcher that describes shapes.

Their dispatch and their plain-torch references are the files of the same names one folder up. All
arithmetic is in float32, rounded where the reference rounds; nothing is added by an atomic; where an
order could depend on a launch shape, the shape is fixed or the sum is a matrix product.
"""
