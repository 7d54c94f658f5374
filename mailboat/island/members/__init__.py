"""Member hosts: an island whose engine spans several hosts moves on all of them, or on none (docs/sidecar.md)."""
