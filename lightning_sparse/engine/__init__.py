"""The engine: turns DDP's buckets of gradients into means."""
