"""What turns DDP's buckets of gradients into means."""
