"""Products of few rows with a weight that is read once."""
