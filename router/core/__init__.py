"""The router's decisions, without I/O."""
