"""Estimate how bytes and time of communication grow with the number of ranks."""
