"""The ranks: process groups, and the messages they exchange."""
