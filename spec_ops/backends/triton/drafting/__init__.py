"""Drafts without a model."""
