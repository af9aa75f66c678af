"""The gradient not yet sent, in a checkpoint."""
