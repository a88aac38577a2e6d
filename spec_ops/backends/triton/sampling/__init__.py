"""Probabilities, draws and acceptance."""
