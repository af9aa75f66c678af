"""Benchmarks: an emulated cluster with slow links, and what to run on it."""
