"""Put in front of the real package for the whole cluster: the oracle is never the engine."""

raise ImportError("transformers is the oracle of tests and must not be imported by a part of Twinpool")
