"""Strict reading and writing of safetensors checkpoints, and the inventory of what they hold."""
