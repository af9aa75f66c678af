"""Compare strategies on a cluster: the same model trained with each in turn."""
