"""The parts of architectures: thin objects over operations of `weft.kernels`."""
