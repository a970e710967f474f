"""gRPC to workers and controller."""
