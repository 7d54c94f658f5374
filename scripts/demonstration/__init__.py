"""The demo: a real trainer, three islands and the control plane on this machine.

It only uses what users have: the control plane's stack, the `mailboat` command and `mailboat.trainer.Publisher`.
"""


class DemoError(Exception):
    """What went wrong, in one sentence."""
