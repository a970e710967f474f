"""The simulator: whole clusters of the production code under a virtual clock and one seed."""
