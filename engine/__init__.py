"""A batch in, drawn tokens and written pages out."""

from engine.checkpoint import dtype_for
from engine.engine import Engine, load_engine
from engine.model import pool_set_spec

__all__ = ["Engine", "dtype_for", "load_engine", "pool_set_spec"]
