"""Mailboat: lossless weight patches from one trainer to rollout islands anywhere.

This package is what trainers and islands install.  Importing it must stay cheap (no NumPy, no Numba, no network) and it
must never import Django; every name below is loaded on first use.
"""

from __future__ import annotations

__version__ = "0.1.0"
__all__ = ["__version__"]
