"""`twinpool serve`: a cluster on this machine."""
