"""The trainer's side: publish checkpoints or tensors as the versions of a run."""

from mailboat.trainer.publisher import PublishedVersion, Publisher, PublishFailed

__all__ = ["PublishFailed", "PublishedVersion", "Publisher"]
