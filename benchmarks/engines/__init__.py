"""Serving engines that attend by this package, beside their own attention backends."""
