"""All compiled code of the library, in one module.

Numba's cache does not notice edits in a callee of another module, so nothing compiled may live elsewhere.  Every function has
an explicit signature (NumPy's promotion of uint64 with int64 to float64 must never happen), releases the GIL and is cached.
Kernels trust their arguments: callers check sizes, kernels never do.
"""

from __future__ import annotations
