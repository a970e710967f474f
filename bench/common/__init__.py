"""What benches share: clients, clusters, workloads, models, reports."""
