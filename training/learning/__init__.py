"""From a batch to a loss, for each kind of drafter."""
