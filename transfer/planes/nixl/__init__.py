"""Plane `nixl`: one-sided writes by NIXL over UCX."""
