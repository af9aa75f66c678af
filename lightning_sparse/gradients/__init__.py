"""Averages gradients within backward."""
