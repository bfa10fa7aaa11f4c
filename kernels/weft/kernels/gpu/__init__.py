"""The operations on NVIDIA GPUs: Triton kernels, and cuBLAS where that is fastest.

Each module holds the GPU form of the front of the same name, which imports it when a tensor lies
on a GPU. Lengths, positions and page numbers are read on the device and not checked there.
"""
