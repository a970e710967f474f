"""The router's gRPC links to the workers and the controller."""
