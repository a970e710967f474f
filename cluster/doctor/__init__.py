"""`twinpool doctor`: what would go wrong if a cluster were launched here now, found before it is launched."""
