"""Migration of running requests, and of finished pages, to other decode workers."""
