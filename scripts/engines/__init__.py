"""The sidecar against a real vLLM built for CPUs."""
