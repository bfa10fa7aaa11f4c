"""The demo model's image tower: scenes of small pictures, questions on them, and training."""
