"""The arena agent, which lends a node's host memory to workers, and its clients."""
