"""The controller, which grants incarnations as leases and decides restarts, and the supervisor that acts on it."""
