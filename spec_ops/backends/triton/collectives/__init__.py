"""Sums and maxima over the ranks of one host."""
