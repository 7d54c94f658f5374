"""Coverage-guided fuzzing: `scripts/fuzz`. What it finds becomes a file in tests/vectors/hostile."""
