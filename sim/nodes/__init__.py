"""The simulated processes: workers with their ranks, the router with its links, and the controller."""
