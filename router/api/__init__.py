"""HTTP: routes, operators' endpoints, connections."""
