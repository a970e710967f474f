"""The radix tree of finished pages."""
