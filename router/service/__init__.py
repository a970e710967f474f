"""A request's life on the event loop."""
