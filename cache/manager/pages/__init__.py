"""Pages and slots of running requests: leased, loaded, grown, sealed."""
