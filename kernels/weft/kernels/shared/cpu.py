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

SOURCE = Path(__file__).parent.parent / "csrc" / "cpu.c"

DTYPES = (torch.float32, torch.bfloat16)
"""Dtypes of the native operations."""


NO_AMX = "-mno-amx-tile"
"""Compiler flag for operations that leave AMX out."""


class WeightStruct(ctypes.Structure):
    """`Weight` of csrc/linear.h."""

    _fields_ = (
        ("panels", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("out_features", ctypes.c_int64),
        ("in_features", ctypes.c_int64),
        ("is_bf16", ctypes.c_int32),
        ("gated", ctypes.c_int32),
        ("alpha", ctypes.c_float),
        ("limit", ctypes.c_float),
        ("offset", ctypes.c_float),
        ("gate_limit", ctypes.c_float),
        ("cubic", ctypes.c_float),
        ("group", ctypes.c_int32),
        ("bits", ctypes.c_int32),
        ("group_scales", ctypes.c_void_p),
        ("has_offsets", ctypes.c_int32),
        ("scale_size", ctypes.c_int32),
        ("is_e2m1", ctypes.c_int32),
        ("is_rotated", ctypes.c_int32),
        ("order", ctypes.c_void_p),
    )


class PoolStruct(ctypes.Structure):
    """`Pool` of csrc/rows.h."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("pages", ctypes.c_int64),
        ("page_stride", ctypes.c_int64),
        ("kv_heads", ctypes.c_int64),
        ("layers", ctypes.c_int64),
        ("page_size", ctypes.c_int64),
        ("dim", ctypes.c_int64),
        ("is_bf16", ctypes.c_int32),
        ("kept", ctypes.c_int32),
    )


class AttentionStruct(ctypes.Structure):
    """`Attention` of csrc/attention.h."""

    _fields_ = (
        ("q", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("page_table", ctypes.c_void_p),
        ("cu_q_lens", ctypes.c_void_p),
        ("kv_lens", ctypes.c_void_p),
        ("requests", ctypes.c_int64),
        ("max_pages", ctypes.c_int64),
        ("table_stride", ctypes.c_int64),
        ("heads", ctypes.c_int64),
        ("scale", ctypes.c_float),
        ("first_seen", ctypes.c_int64),
        ("window", ctypes.c_int64),
        ("is_chunked", ctypes.c_int64),
        ("ancestors", ctypes.c_void_p),
        ("earlier_rows", ctypes.c_int64),
        ("sinks", ctypes.c_void_p),
        ("softcap", ctypes.c_float),
        ("key_ends", ctypes.c_void_p),
    )


class LoraPartStruct(ctypes.Structure):
    """`LoraPart` of csrc/lora.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("a", "b", "table", "b_table", "counts")),
        *((name, ctypes.c_int64) for name in ("rows", "b_rows", "layers", "slots", "max_rows")),
        *((name, ctypes.c_int64) for name in ("in_features", "out_features", "column", "offset")),
    )


class LoraGroupStruct(ctypes.Structure):
    """`LoraGroup` of csrc/lora.h."""

    _fields_ = (("parts", LoraPartStruct * 3), ("count", ctypes.c_int64))


class LoraStruct(ctypes.Structure):
    """`Lora` of csrc/lora.h."""

    _fields_ = (
        ("groups", LoraGroupStruct * 4),
        *((name, ctypes.c_void_p) for name in ("token_slots", "order", "starts", "slots")),
        *((name, ctypes.c_void_p) for name in ("blocks", "shrunk")),
        *((name, ctypes.c_int64) for name in ("tokens", "segments", "width")),
    )


class LayerStruct(ctypes.Structure):
    """`Layer` of csrc/layer.h."""

    _fields_ = (
        ("qkv", ctypes.c_void_p),
        ("o", ctypes.c_void_p),
        ("gate_up", ctypes.c_void_p),
        ("down", ctypes.c_void_p),
        ("input_norm", ctypes.c_void_p),
        ("post_norm", ctypes.c_void_p),
        ("q_norm", ctypes.c_void_p),
        ("k_norm", ctypes.c_void_p),
        ("eps", ctypes.c_float),
        ("window", ctypes.c_int64),
        ("group", ctypes.c_int64),
        ("pool_shift", ctypes.c_int64),
    )


class PagesStruct(ctypes.Structure):
    """`Pages` of csrc/layer.h."""

    _fields_ = (
        ("pool", PoolStruct),
        ("page_table", ctypes.c_void_p),
        ("max_pages", ctypes.c_int64),
        ("table_stride", ctypes.c_int64),
        ("slots", ctypes.c_void_p),
    )


class PeersStruct(ctypes.Structure):
    """`Peers` of csrc/peers.h."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("rank", "size")),
        *((name, ctypes.c_void_p) for name in ("arrived", "stop", "slots")),
        *((name, ctypes.c_int64) for name in ("slot_floats", "limit_ns")),
        ("round", ctypes.c_uint32),
        ("spins", ctypes.c_int32),
        ("hash", ctypes.c_uint64),
        ("is_checked", ctypes.c_int64),
    )


class BatchStruct(ctypes.Structure):
    """`Batch` of csrc/layer.h."""

    _fields_ = (
        ("attention", AttentionStruct),
        ("positions", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("cos_sin", ctypes.c_void_p),
        ("max_positions", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("scratch", ctypes.c_void_p),
        ("lora", ctypes.c_void_p),
        ("further", ctypes.c_void_p),
        ("num_further", ctypes.c_int64),
        ("peers", ctypes.c_void_p),
        ("partial", ctypes.c_void_p),
        ("lost", ctypes.c_int32),
    )


MAX_TAPS = 8


class TapsStruct(ctypes.Structure):
    """`Taps` of csrc/layer.h."""

    _fields_ = (
        ("out", ctypes.c_void_p),
        ("width", ctypes.c_int64),
        ("count", ctypes.c_int64),
        ("layers", ctypes.c_int64 * MAX_TAPS),
        ("columns", ctypes.c_int64 * MAX_TAPS),
    )


class ExpertsStruct(ctypes.Structure):
    """`Experts` of csrc/moe.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("w13", "w2")),
        *((name, ctypes.c_int64) for name in ("experts", "top_k", "rows")),
        *((name, ctypes.c_void_p) for name in ("x", "ids", "weights", "residual", "out")),
        *((name, ctypes.c_void_p) for name in ("begins", "units", "place")),
        *((name, ctypes.c_void_p) for name in ("gathered", "inner", "products")),
        *((name, ctypes.c_void_p) for name in ("lora", "place_slots")),
        *((name, ctypes.c_int64) for name in ("layer", "is_share")),
    )


class DraftHeadStruct(ctypes.Structure):
    """`DraftHead` of csrc/draft.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("fc", "qkv", "kv", "o", "gate_up", "down")),
        *((name, ctypes.c_void_p) for name in ("lm_head", "input_norm", "hidden_norm")),
        *((name, ctypes.c_void_p) for name in ("post_norm", "norm", "embedding", "target_ids")),
        ("cos_sin", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("vocab", "hidden", "max_positions", "heads")),
        *((name, ctypes.c_float) for name in ("eps", "scale")),
        ("norms_first", ctypes.c_int32),
    )


class DraftEntriesStruct(ctypes.Structure):
    """`DraftEntries` of csrc/draft.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("aux", "g", "kept", "token_ids", "positions")),
        *((name, ctypes.c_void_p) for name in ("slots", "cu_q_lens", "request_slots")),
        ("ancestors", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("rows", "requests", "places")),
        ("scratch", ctypes.c_void_p),
    )


class DraftWriteStruct(ctypes.Structure):
    """`DraftWrite` of csrc/draft.h."""

    _fields_ = (
        ("head", ctypes.c_void_p),
        ("entries", ctypes.c_void_p),
        ("layer", ctypes.c_int64),
    )


class DraftChainStruct(ctypes.Structure):
    """`DraftChain` of csrc/draft.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("state", "token_ids", "positions", "slots")),
        *((name, ctypes.c_void_p) for name in ("kv_lens", "counts", "page_table", "cu_q_lens")),
        *((name, ctypes.c_int64) for name in ("depth", "requests", "max_pages", "table_stride")),
        *((name, ctypes.c_void_p) for name in ("scratch", "logits")),
    )


class BothWaysStruct(ctypes.Structure):
    """`BothWays` of csrc/encoder.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "k", "out", "cu_lens")),
        *((name, ctypes.c_int64) for name in ("q_row", "k_row", "to_value")),
        *((name, ctypes.c_int64) for name in ("sequences", "heads", "kv_heads", "dim", "reach")),
        ("scale", ctypes.c_float),
        ("is_bf16", ctypes.c_int32),
    )


class RecurrenceStruct(ctypes.Structure):
    """`Recurrence` of csrc/recurrent.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "k", "v")),
        *((name, ctypes.c_int64) for name in ("q_row", "k_row", "v_row")),
        *((name, ctypes.c_int64) for name in ("q_head", "k_head", "v_head")),
        *((name, ctypes.c_void_p) for name in ("decay", "beta", "steps", "skips")),
        *((name, ctypes.c_void_p) for name in ("states", "out", "cu_lens")),
        *((name, ctypes.c_int64) for name in ("sequences", "heads", "shared", "keys", "values")),
        ("decays", ctypes.c_int64),
        ("scale", ctypes.c_float),
        ("is_bf16", ctypes.c_int32),
        ("is_unit", ctypes.c_int32),
    )


class SelectionStruct(ctypes.Structure):
    """`Selection` of csrc/recurrent.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "b", "c", "dt", "a", "d")),
        *((name, ctypes.c_void_p) for name in ("states", "out", "cu_lens")),
        *((name, ctypes.c_int64) for name in ("sequences", "channels", "keys")),
        ("is_bf16", ctypes.c_int32),
    )


class ConvolutionStruct(ctypes.Structure):
    """`Convolution` of csrc/recurrent.h."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("row", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("weight", "bias", "tails", "out", "cu_lens")),
        *((name, ctypes.c_int64) for name in ("sequences", "channels", "taps")),
        ("is_bf16", ctypes.c_int32),
        ("has_silu", ctypes.c_int32),
    )


class NativeCpu:
    """The functions of csrc/cpu.c. Pointers are passed as integers (`Tensor.data_ptr()`).

    Callers check shapes and dtypes: the functions do not.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        pointer, long, integer, real = (
            ctypes.c_void_p,
            ctypes.c_int64,
            ctypes.c_int,
            ctypes.c_float,
        )
        norm = (integer, integer, pointer, pointer, pointer, pointer, long, long, real)
        rope = (
            *(pointer, long, pointer, pointer, pointer, pointer, long),
            *(pointer, pointer, integer, real, long, long, long, pointer),
        )
        attention = (
            *(pointer, long, *[pointer] * 5, *[long] * 5, real),
            *(long, long, long, pointer, long, pointer, real, pointer),
        )
        declare = functools.partial(_declare, library)
        self.pack = declare("weft_pack", None, *[pointer] * 7)
        self.pack_groups = declare("weft_pack_groups", None, *[pointer] * 9)
        self.packed_words = declare("weft_packed_words", long, pointer)
        self.packed_columns = declare("weft_packed_columns", long, pointer)
        self.linear = declare(
            "weft_linear", integer, pointer, pointer, long, pointer, pointer, integer, pointer, long
        )
        self.prepare_lora = declare("weft_prepare_lora", integer, pointer, long, long)
        self.quantise_rows = declare(
            "weft_quantise_rows", None, integer, pointer, long, long, pointer, pointer
        )
        ranges = (integer, pointer, long, long, long, pointer, pointer)
        self.group_ranges = declare("weft_group_ranges", None, *ranges)
        self.round_groups = declare("weft_round_groups", None, *ranges, pointer)
        self.moe = declare("weft_moe", integer, pointer)
        self.rms_norm = declare("weft_rms_norm", None, *norm)
        self.silu_and_mul = declare(
            "weft_silu_and_mul", None, integer, pointer, pointer, long, long
        )
        self.rope_and_cache = declare("weft_rope_and_cache", integer, *rope)
        self.paged_attention = declare("weft_paged_attention", integer, *attention)
        self.both_ways = declare("weft_both_ways", integer, pointer)
        self.layer_scratch_width = declare("weft_layer_scratch_width", long, pointer, pointer, long)
        self.check_batch = declare("weft_check_batch", integer, pointer, pointer)
        self.decoder_layers = declare(
            "weft_decoder_layers", integer, pointer, long, long, *[pointer] * 5
        )
        self.draft_entries_width = declare("weft_draft_entries_width", long, pointer)
        self.draft_entries = declare("weft_draft_entries", integer, pointer, pointer)
        self.draft_chain_width = declare("weft_draft_chain_width", long, pointer, long)
        self.draft_chain = declare("weft_draft_chain", integer, *[pointer] * 3, long)
        self.recurrence = declare("weft_recurrence", None, pointer)
        self.selective_scan = declare("weft_selective_scan", None, pointer)
        self.convolution = declare("weft_convolution", None, pointer)
        self.announce = declare("weft_announce", None, pointer, ctypes.c_uint32)
        self.await_count = declare(
            "weft_await", integer, pointer, ctypes.c_uint32, pointer, long, long
        )
        self.add_sum = declare(
            "weft_add_sum", integer, pointer, pointer, long, pointer, pointer, integer
        )
        self.native_bf16 = bool(declare("weft_native_bf16", integer)())
        """Whether bfloat16 products run in hardware (AVX512-BF16)."""
        amx = declare("weft_ask_for_amx", integer)()
        self.has_amx = amx == 1
        """Whether bfloat16 products run on AMX."""
        self.is_amx_refused = amx == -1
        """Whether the CPU has AMX but the system refuses it to this process."""
        self.takes_int8_rows = bool(declare("weft_takes_int8_rows", integer)())
        """Whether products take rows in int8 (`rotated.py`): with AMX or AVX512-VNNI."""
        self.max_dim = int(declare("weft_max_dim", integer)())
        """Largest head_dim of attention."""
        self.max_group = int(declare("weft_max_group", integer)())
        """Largest number of query heads a KV head."""
        self.max_keys = int(declare("weft_max_keys", integer)())
        """Most keys of a state in `recurrence`."""
        self.max_taps_of_conv = int(declare("weft_max_taps_of_conv", integer)())


def _declare(
    library: ctypes.CDLL, name: str, result: type | None, *arguments: type
) -> ctypes._NamedFuncPointer:
    function = library[name]
    function.restype, function.argtypes = result, arguments
    return function


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
