"""The default that needs no set-up: PostgreSQL from a wheel, and one supervisor for all processes."""
