"""Messages as protobuf, and the gRPC channels that carry them."""
