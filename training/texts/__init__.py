"""What drafters are trained on: where it comes from, how it is labelled, whether it fits."""
