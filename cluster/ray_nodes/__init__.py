"""All use of Ray: joining a cluster, actors of workers and arena agents, nodes that drain."""
