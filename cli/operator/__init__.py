"""The commands that ask a cluster's router: what it tells, and what an operator changes."""
