"""Commands of the interface."""
