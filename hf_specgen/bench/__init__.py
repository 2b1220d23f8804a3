"""Runs on real models that people start by hand: the demo and the measurements. Nothing else imports this package."""
