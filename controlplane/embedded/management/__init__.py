"""Commands of the embedded default."""
