"""The router's service: a request from admission to its end, on the event loop."""
