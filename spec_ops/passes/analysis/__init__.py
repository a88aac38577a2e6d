"""What the passes know of a graph's values besides the graph itself."""
