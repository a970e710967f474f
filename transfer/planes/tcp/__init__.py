"""Planes `zmq` and `staged`: pages over TCP connections, with or without bounce buffers."""
