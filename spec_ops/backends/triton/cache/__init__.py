"""Writes to paged caches, and the tables that say where their pages are."""
