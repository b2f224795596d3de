"""Benchmarks: plain scripts, run by `make bench` and `make bench-side-by-side`, never collected by pytest."""
