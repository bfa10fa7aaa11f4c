"""Models: architectures as modules over shared layers, and the weights that they read."""
