"""The agent that lends a node's host memory, and its clients."""
