"""The default that needs no set-up: PostgreSQL from a wheel, and one supervisor for every process of the control plane."""
