"""Asynchronous reinforcement learning over Mailboat: SmolLM2-135M learns a toy task from its islands' answers.

The trainer takes no sample that was not made by an island, and none whose version is not known.
"""
