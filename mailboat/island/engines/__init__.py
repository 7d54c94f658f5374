"""What receives the weights of an island. Each engine moves from one whole version to another or stays where it is."""
