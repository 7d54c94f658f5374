"""The sidecar: a reverse proxy in front of an island's engines that knows which version they hold."""
