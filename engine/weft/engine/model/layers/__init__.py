"""What architectures are made of: thin objects over operations of `weft.kernels`."""
