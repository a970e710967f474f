"""A batch in, drawn tokens and written pages out."""

from engine.engine import Engine, load_engine
from engine.models import Model, StateOptions, model_for, read_model
from engine.weights import dtype_for

__all__ = ["Engine", "Model", "StateOptions", "dtype_for", "load_engine", "model_for", "read_model"]
