"""Running requests and finished pages to other decode workers."""
