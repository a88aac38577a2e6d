"""Measurements behind `python -m spec_ops bench`."""
