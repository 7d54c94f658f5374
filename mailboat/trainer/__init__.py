"""The trainer's side: publish checkpoints or tensors as the versions of a run."""

from mailboat.trainer.publisher import PublishedVersion, Publisher, PublishFailed
from mailboat.trainer.served import ServedWeights, follow

__all__ = ["PublishFailed", "PublishedVersion", "Publisher", "ServedWeights", "follow"]
