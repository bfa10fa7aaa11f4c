"""The operations on NVIDIA GPUs: Triton kernels, and cuBLAS where that is fastest.

Each module holds the GPU form of the operation of the same name, which imports it when a tensor
lies on a GPU. Kernels read lengths, positions and page numbers on the device and do not check them.
"""
