"""The life of a worker's process."""
