"""Trained drafting heads as networks, and the loaders of published checkpoint layouts."""
