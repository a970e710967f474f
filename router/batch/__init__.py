"""Files that clients upload, and batches of requests that run in idle capacity."""
