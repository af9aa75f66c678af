"""The strategies for a Trainer, and what they hold: signals, the average that is shown, a host of several."""
