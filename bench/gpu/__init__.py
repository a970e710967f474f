"""What is measured on a GPU: `python -m bench.gpu`."""

from tests.support.process_sockets import install

STANDS_IN = install()
"""Whether the queues of `process_sockets` are in pyzmq's place: only what stays in one process can be run then."""
