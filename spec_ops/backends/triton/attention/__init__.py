"""Paged attention: how it is divided, masked, computed and launched."""
