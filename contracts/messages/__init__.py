"""The messages between processes, one file for each edge."""
