"""The native CPU operations: loads csrc/cpu.c and declares its functions."""

from __future__ import annotations

import ctypes
import functools
import hashlib
from pathlib import Path

import torch
from weft.kernels.shared.build import (
    load_native,
    load_packaged,
    loaded_openmp_library,
)
from weft.kernels.shared.c_declarations import c_function, c_number, from_c

SOURCE = Path(__file__).parent.parent / "csrc" / "cpu.c"

DTYPES = (torch.float32, torch.bfloat16)
"""Dtypes of the native operations."""


NO_AMX = "-mno-amx-tile"
"""Compiler flag for operations that leave AMX out."""


@from_c
class WeightStruct(ctypes.Structure):
    """`Weight` of csrc/linear.h."""


@from_c
class PoolStruct(ctypes.Structure):
    """`Pool` of csrc/rows.h."""


@from_c
class AttentionStruct(ctypes.Structure):
    """`Attention` of csrc/attention.h."""


@from_c
class LoraPartStruct(ctypes.Structure):
    """`LoraPart` of csrc/lora.h."""


@from_c
class LoraGroupStruct(ctypes.Structure):
    """`LoraGroup` of csrc/lora.h."""


@from_c
class LoraStruct(ctypes.Structure):
    """`Lora` of csrc/lora.h."""


@from_c
class LayerStruct(ctypes.Structure):
    """`Layer` of csrc/layer.h."""


@from_c
class PagesStruct(ctypes.Structure):
    """`Pages` of csrc/layer.h."""


@from_c
class PeersStruct(ctypes.Structure):
    """`Peers` of csrc/peers.h."""


@from_c
class BatchStruct(ctypes.Structure):
    """`Batch` of csrc/layer.h."""


MAX_TAPS = c_number("MAX_TAPS")


@from_c
class TapsStruct(ctypes.Structure):
    """`Taps` of csrc/layer.h."""


@from_c
class ExpertsStruct(ctypes.Structure):
    """`Experts` of csrc/moe.h."""


@from_c
class DraftHeadStruct(ctypes.Structure):
    """`DraftHead` of csrc/draft.h."""


@from_c
class DraftEntriesStruct(ctypes.Structure):
    """`DraftEntries` of csrc/draft.h."""


@from_c
class DraftWriteStruct(ctypes.Structure):
    """`DraftWrite` of csrc/draft.h."""


@from_c
class DraftChainStruct(ctypes.Structure):
    """`DraftChain` of csrc/draft.h."""


@from_c
class BothWaysStruct(ctypes.Structure):
    """`BothWays` of csrc/encoder.h."""


@from_c
class RecurrenceStruct(ctypes.Structure):
    """`Recurrence` of csrc/recurrent.h."""


@from_c
class SelectionStruct(ctypes.Structure):
    """`Selection` of csrc/recurrent.h."""


@from_c
class ConvolutionStruct(ctypes.Structure):
    """`Convolution` of csrc/recurrent.h."""


class NativeCpu:
    """The functions of csrc/cpu.c. Pointers are passed as integers (`Tensor.data_ptr()`).

    Callers check shapes and dtypes: the functions do not.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        declare = functools.partial(c_function, library)
        self.pack = declare("weft_pack")
        self.pack_groups = declare("weft_pack_groups")
        self.packed_words = declare("weft_packed_words")
        self.packed_columns = declare("weft_packed_columns")
        self.linear = declare("weft_linear")
        self.prepare_lora = declare("weft_prepare_lora")
        self.quantise_rows = declare("weft_quantise_rows")
        self.group_ranges = declare("weft_group_ranges")
        self.round_groups = declare("weft_round_groups")
        self.moe = declare("weft_moe")
        self.rms_norm = declare("weft_rms_norm")
        self.silu_and_mul = declare("weft_silu_and_mul")
        self.rope_and_cache = declare("weft_rope_and_cache")
        self.paged_attention = declare("weft_paged_attention")
        self.both_ways = declare("weft_both_ways")
        self.layer_scratch_width = declare("weft_layer_scratch_width")
        self.check_batch = declare("weft_check_batch")
        self.decoder_layers = declare("weft_decoder_layers")
        self.draft_entries_width = declare("weft_draft_entries_width")
        self.draft_entries = declare("weft_draft_entries")
        self.draft_chain_width = declare("weft_draft_chain_width")
        self.draft_chain = declare("weft_draft_chain")
        self.recurrence = declare("weft_recurrence")
        self.selective_scan = declare("weft_selective_scan")
        self.convolution = declare("weft_convolution")
        self.announce = declare("weft_announce")
        self.await_count = declare("weft_await")
        self.add_sum = declare("weft_add_sum")
        self.native_bf16 = bool(declare("weft_native_bf16")())
        """Whether bfloat16 products run in hardware (AVX512-BF16)."""
        amx = declare("weft_ask_for_amx")()
        self.has_amx = amx == 1
        """Whether bfloat16 products run on AMX."""
        self.is_amx_refused = amx == -1
        """Whether the CPU has AMX but the system refuses it to this process."""
        self.takes_int8_rows = bool(declare("weft_takes_int8_rows")())
        """Whether products take rows in int8 (`rotated.py`): with AMX or AVX512-VNNI."""
        self.max_dim = int(declare("weft_max_dim")())
        """Largest head_dim of attention."""
        self.max_group = int(declare("weft_max_group")())
        """Largest number of query heads a KV head."""
        self.max_keys = int(declare("weft_max_keys")())
        """Most keys of a state in `recurrence`."""
        self.max_taps_of_conv = int(declare("weft_max_taps_of_conv")())


def load_without_amx() -> NativeCpu | None:
    """The native operations as on a CPU without AMX, to compare with; None if it cannot be built.

    It multiplies weights that were packed for AMX.
    """
    built = load_native(
        SOURCE, openmp_library=loaded_openmp_library(), flags=(_headers_flag(), NO_AMX)
    ).library
    return None if built is None else NativeCpu(built)


@functools.cache
def _load() -> tuple[NativeCpu | None, str | None]:
    built = load_packaged(SOURCE, openmp_library=loaded_openmp_library(), flags=(_headers_flag(),))
    if built.library is None:
        return None, built.reason
    return NativeCpu(built.library), None


def _headers_flag() -> str:
    """A definition that makes the cached build depend on the headers too."""
    headers = sorted(SOURCE.parent.glob("*.h"))
    content = hashlib.blake2b(b"\0".join(h.read_bytes() for h in headers), digest_size=8)
    return f"-DWEFT_HEADERS=0x{content.hexdigest()}"


def native_cpu() -> NativeCpu | None:
    """The native operations; None where they cannot be built. The first call may compile."""
    return _load()[0]


def native_cpu_missing() -> str | None:
    """Why there are no native operations, in one line for the start-up log; None if there are."""
    return _load()[1]


def native_cpu_for(x: torch.Tensor) -> NativeCpu | None:
    """The native operations if they can compute with `x`, by its device and dtype."""
    return _load()[0] if x.is_cpu and x.dtype in DTYPES else None


_STATUS = (
    "",
    "out of memory",
    "cu_q_lens, kv_lens and the page table do not fit together",
    "a page table names a page that the pool does not have",
    "a position lies beyond the rotation table",
    "a slot lies beyond the pool",
    "the LoRA segments do not fit the tokens, or a table names rows that the pool does not have",
    "an expert does not exist",
    "a token is not of the vocabulary, or a request's slot does not exist",
)


def check_status(status: int, operation: str) -> None:
    """Raises the error of a native operation's status.

    Raises:
        MemoryError: The operation ran out of memory.
        IndexError: An index in its arguments points outside; nothing was read or written.
    """
    if status == 1:
        raise MemoryError(f"{operation}: {_STATUS[status]}")
    if status:
        raise IndexError(f"{operation}: {_STATUS[status]}")
