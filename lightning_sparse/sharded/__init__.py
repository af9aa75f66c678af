"""Models that FSDP2 shards inside nodes."""
