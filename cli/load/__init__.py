"""The commands that send load: a trace that is replayed, the pools that one needs, the demonstration."""
