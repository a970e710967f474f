"""The engine: computes a step from a batch, returns drawn tokens and leaves its state in pages."""

from twinpool.engine.models.model_base import Model, StateOptions
from twinpool.engine.models.registry import model_for, read_model
from twinpool.engine.runner.kernel_choice import dtype_for
from twinpool.engine.runner.load_model import load_engine
from twinpool.engine.runner.model_runner import ModelRunner

__all__ = ["Model", "ModelRunner", "StateOptions", "dtype_for", "load_engine", "model_for", "read_model"]
