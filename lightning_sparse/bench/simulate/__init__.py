"""``lightning-sparse simulate``: what a strategy costs in loss, without a cluster."""
