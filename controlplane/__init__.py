"""The control plane: a Django project that records versions, steers islands and runs jobs. Nothing in `mailboat` may
import it.
"""
