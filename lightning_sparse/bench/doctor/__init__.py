"""Say what a machine or cluster has, what will be used, and what is wrong."""
