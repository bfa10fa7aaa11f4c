"""What adapters may take of a worker, and the words for what does not fit. Pure Python."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from weft.engine.errors import AdapterError
from weft.engine.lora.rows import Needs


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraLimits:
    """Bounds that follow from the settings and from the model."""

    max_loras: int
    """Adapters on the device at once."""
    memory_bytes: int
    """Setting that rows on the device follow from; those of a draft head come in addition."""
    num_rows: Needs
    """Rows on the device by kind of projection: all kinds that can be changed."""
    row_bytes: Mapping[str, int]
    """Of one row, by kind."""
    host_bytes: int
    """Of adapters in host memory."""

    def describe(self) -> str:
        """In one line, for logs and status."""
        rows = ", ".join(f"{kind} {count:,}" for kind, count in self.num_rows.items())
        size = sum(count * self.row_bytes[kind] for kind, count in self.num_rows.items())
        return (
            f"adapters: {size / 2**20:,.0f} MiB on the device, at most "
            f"{self.max_loras} at once; rows of rank 8: {rows}"
        )

    def check(self, name: str, needs: Needs, num_bytes: int) -> None:
        """An adapter fits if nothing else is there.

        Args:
            name: For the message.
            needs: Its rows.
            num_bytes: Of its weights on the host.

        Raises:
            AdapterError: It does not, with the arithmetic.
        """
        if num_bytes > self.host_bytes:
            raise AdapterError(
                f"{name} takes {num_bytes:,} bytes of host memory, lora_host_bytes = "
                f"{self.host_bytes:,} is all there is"
            )
        self._check_rows(name, needs, {}, "all there are")

    def check_beside(self, name: str, pinned: Sequence[Needs], others: Iterable[Needs]) -> None:
        """Pinned adapters leave room for any one of the others.

        Args:
            name: Of the adapter that is looked at, which is among them.
            pinned: Rows of each pinned one.
            others: Rows of each other one.

        Raises:
            AdapterError: They do not, with the arithmetic.
        """
        others = list(others)
        wanted = len(pinned) + bool(others)
        if wanted > self.max_loras:
            raise AdapterError(
                f"{name}: {len(pinned)} pinned adapters and one place for the others make {wanted},"
                f" max_loras = {self.max_loras}; pin fewer or raise it"
            )
        taken = {kind: sum(needs.get(kind, 0) for needs in pinned) for kind in self.num_rows}
        most = {kind: max((n.get(kind, 0) for n in others), default=0) for kind in self.num_rows}
        self._check_rows(name, most, taken, f"{len(pinned)} pinned have the others")

    def _check_rows(self, name: str, needs: Needs, taken: Needs, where: str) -> None:
        for kind, count in needs.items():
            total, used = self.num_rows[kind], taken.get(kind, 0)
            if count + used <= total:
                continue
            least = -(-self.memory_bytes * (count + used) // total)
            raise AdapterError(
                f"{name} does not fit: {count} rows of {self.row_bytes[kind]:,} bytes for {kind}, "
                f"of {total} it could have {total - used} ({where}); lora_memory_bytes = "
                f"{self.memory_bytes:,}, with {least:,} it would"
            )
