"""The router's HTTP side: routes, operators' endpoints, connections."""
