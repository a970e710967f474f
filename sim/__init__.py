"""The simulator: whole clusters of the production brains under a virtual clock and one seed."""
