"""A worker's process: engine thread, gRPC service, lease, watchdog, and the followers' processes."""
