"""Worker extensions for the test alone: vLLM multiplies with the plain weights instead of packed copies.

vLLM's CPU build packs weights for oneDNN, small ones for SGL's kernels where the processor has AMX, and computes from
the copies, so that live parameters can't be written in place: Mailboat's extension refuses, and way A is taken. With
plain weights the CPU build does what GPUs do. All servers of one run are alike, so that their logprobs can be compared
bit for bit.
"""

from __future__ import annotations

import vllm._custom_ops as ops  # type: ignore[import-not-found, unused-ignore]
import vllm.model_executor.layers.utils as layers  # type: ignore[import-not-found, unused-ignore]

from mailboat.island.engines.vllm_extension import MailboatWorker

# Both are read when a layer's weights have been loaded, later than this.
ops._supports_onednn = False
layers.check_cpu_sgl_kernel = lambda *_shape: False


class Plain:
    """Without Mailboat: way A."""


class PlainMailboat(MailboatWorker):
    """With it: way B."""
