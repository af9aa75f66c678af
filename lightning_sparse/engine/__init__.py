"""What all averagers share: groups, lanes, buckets, and what is watched."""
