"""What all scripts share: arguments and refusals, the target, Trainer and its checkpoints, where weights come from."""
