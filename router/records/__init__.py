"""Records of requests: made, kept, reported to the controller, and exported as traces."""
