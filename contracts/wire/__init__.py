"""Messages as bytes, and the gRPC channels and frames that carry them."""
