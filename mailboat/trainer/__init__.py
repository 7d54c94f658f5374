"""The trainer's side: publish checkpoints or tensors as the versions of a run."""

from mailboat.trainer.hooks import follow
from mailboat.trainer.publisher import PublishedVersion, Publisher, PublishFailed
from mailboat.trainer.ranked import RankedPublisher
from mailboat.trainer.ranks import PeerFailed
from mailboat.trainer.seconds import Seconds
from mailboat.trainer.served import ServedWeights

__all__ = [
    "PeerFailed",
    "PublishFailed",
    "PublishedVersion",
    "Publisher",
    "RankedPublisher",
    "Seconds",
    "ServedWeights",
    "follow",
]
