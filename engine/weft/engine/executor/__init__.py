"""One step on the device: inputs, CUDA graphs, forward pass, sampling. It knows no loop and no
lease.
"""
