"""Ray at the edge: actors, nodes, drains."""
