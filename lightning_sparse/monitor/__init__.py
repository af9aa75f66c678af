"""Reports on compression in a training."""
