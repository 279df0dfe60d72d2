"""Benchmarks: openk3 and its peers in turns, one process each, every figure with where it comes from (rule 6 of the house)."""
