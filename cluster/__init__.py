"""Launching and operating a cluster: controller, workers' processes, ranks, arenas, Ray, `twinpool serve`."""

import os

# gRPC reads this when it is imported. Its handlers around fork abort or hang the child while other threads make calls,
# and Ray starts its processes by fork; ours never run anything between fork and exec that gRPC would have to survive.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
