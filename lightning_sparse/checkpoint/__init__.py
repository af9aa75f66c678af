"""What a checkpoint keeps of the gradient that has not been sent."""
