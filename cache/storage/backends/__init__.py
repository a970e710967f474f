"""Where objects lie: in files, in memory, on a Redis server."""
