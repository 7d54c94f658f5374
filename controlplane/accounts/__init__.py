"""People, tokens and their roles in a project."""
