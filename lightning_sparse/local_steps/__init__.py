"""Averages what the ranks' own optimizers did."""
