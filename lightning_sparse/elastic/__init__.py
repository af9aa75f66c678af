"""Local steps among hosts that come and go."""
