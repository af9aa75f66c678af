"""Which parameters travel together."""
