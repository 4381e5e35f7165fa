"""Hyperparameter search for multi-objective reinforcement learning on Dask clusters."""

__version__ = "0.1.0"
