"""The interfaces of a worker: to the thread of its host, and to routers."""
