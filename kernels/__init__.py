"""Triton kernels for the GPU, each with a NumPy twin in `reference`: changes, sums, served formats.

This package imports nothing of Mailboat's and uses relative imports only: the wheel carries it as `mailboat._kernels`,
a checkout as `kernels`, and `mailboat.patch.backends` is the one place that finds it. `reference` and `numbers` need
NumPy alone; the other modules need torch and Triton, and run on CPU tensors through Triton's interpreter when
TRITON_INTERPRET=1 stood in the environment before Triton was imported.

Rules: bits, never float comparisons; indices in 64 bits; what a float operation rounds is a single IEEE-754 multiply or
a division rounded to nearest, never a sum, so that no compiler can fuse it and every device gives the same bits.
"""
