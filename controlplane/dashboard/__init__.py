"""Pages for people: live where it helps, readable without JavaScript."""
