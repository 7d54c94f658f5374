"""Served formats smaller than BF16, made from it: the same bits on every machine, so that they can be patched.

A quantiser here is a function of a checkpoint's bits alone: no calibration, no randomness, no sums of floats whose
order could matter. Arithmetic and names: docs/format/quantisers.md.
"""

FORMATS = ("fp8-block", "fp8-channel", "nvfp4", "mxfp4", "int4")
