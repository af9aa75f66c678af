"""The policy of ``sparse_auto``: chooses what averages, and changes between gradients and local steps."""
