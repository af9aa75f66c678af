"""What a training reports about compression."""
