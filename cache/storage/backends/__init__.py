"""The storage backends: objects in files, in memory, or on a Redis server."""
