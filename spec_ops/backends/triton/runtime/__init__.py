"""What every kernel needs around it: launches, arrival counters, compilation without a GPU."""
