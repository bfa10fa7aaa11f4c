"""One step on the device: inputs, CUDA graphs, forward, drawing. It knows no loop and no lease."""
