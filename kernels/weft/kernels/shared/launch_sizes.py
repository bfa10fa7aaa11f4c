"""Sizes of launches. Triton's functions of the same names also serve kernels, and take
microseconds.
"""


def cdiv(number: int, size: int) -> int:
    """`number / size`, rounded up."""
    return -(-number // size)


def next_power_of_2(number: int) -> int:
    """The smallest power of two that is at least `number`, which is at least 1."""
    return 1 << max(0, number - 1).bit_length()


def block_dim(dim: int) -> int:
    """Columns of a program for heads of `dim` elements; tensor cores take at least 16."""
    return max(16, next_power_of_2(dim))
