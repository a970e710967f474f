"""The files by which a cluster's sockets are protected: X.509 certificates for TLS, and CURVE keys for ZeroMQ."""
