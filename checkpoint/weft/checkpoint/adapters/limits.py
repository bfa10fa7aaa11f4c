"""Limits of a worker on adapters, and the messages about adapters that exceed them. Pure Python."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from weft.checkpoint.adapters.projections import WHOLE_SUFFIX
from weft.checkpoint.adapters.rows import Needs
from weft.contract.errors import AdapterError


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraLimits:
    max_loras: int
    """Most adapters on the device at once."""
    memory_bytes: int
    """Bytes of device memory as configured, which determine the number of device rows. Rows of a
    draft head come in addition.
    """
    num_rows: Needs
    """Device rows by kind of projection, for all kinds that can be changed."""
    row_bytes: Mapping[str, int]
    """Bytes of a row, by kind."""
    host_bytes: int
    """Bytes of host memory for adapters."""

    def describe(self) -> str:
        kinds = {k: count for k, count in self.num_rows.items() if not k.endswith(WHOLE_SUFFIX)}
        rows = ", ".join(f"{kind} {count:,}" for kind, count in kinds.items())
        whole = self.num_rows.keys() - kinds.keys()
        rows += "".join(
            f"; {self.num_rows[kind]} whole {kind.removesuffix(WHOLE_SUFFIX)}"
            for kind in sorted(whole)
        )
        size = sum(count * self.row_bytes[kind] for kind, count in self.num_rows.items())
        return (
            f"adapters: {size / 2**20:,.0f} MiB on the device, at most "
            f"{self.max_loras} at once; rows of rank 8: {rows}"
        )

    def check(self, name: str, needs: Needs, num_bytes: int) -> None:
        """Checks that an adapter of `num_bytes` host bytes fits into an empty device. Raises
        AdapterError, whose message shows the arithmetic.
        """
        if num_bytes > self.host_bytes:
            raise AdapterError(
                f"{name} takes {num_bytes:,} bytes of host memory, lora_host_bytes = "
                f"{self.host_bytes:,} is all there is"
            )
        self._check_rows(name, needs, {}, "all there are")

    def check_beside(
        self,
        name: str,
        needs: Needs,
        pinned: Sequence[Needs],
        others: Sequence[tuple[str, Needs]],
        *,
        is_pinned: bool,
    ) -> None:
        """Checks that the pinned adapters leave room for any one of the others. `is_pinned` says
        whether the adapter `name` is to be pinned too; `pinned` and `others` do not contain it.
        Raises AdapterError, whose message shows the arithmetic.
        """
        if is_pinned:
            self._check_rows(name, needs, _sum(pinned), f"{len(pinned)} pinned have the others")
            pinned = [*pinned, needs]
        else:
            others = [*others, (name, needs)]
        wanted = len(pinned) + bool(others)
        if wanted > self.max_loras:
            raise AdapterError(
                f"{name}: {len(pinned)} pinned adapters and one place for the others make {wanted},"
                f" max_loras = {self.max_loras}; pin fewer or raise it"
            )
        taken, where = _sum(pinned), f"{len(pinned)} pinned have the others"
        for other, rows in others:
            self._check_rows(f"beside {name}, {other}" if is_pinned else other, rows, taken, where)

    def _check_rows(self, name: str, needs: Needs, taken: Needs, where: str) -> None:
        for kind, count in needs.items():
            total, used = self.num_rows[kind], taken.get(kind, 0)
            if count + used <= total:
                continue
            if kind.endswith(WHOLE_SUFFIX):
                raise AdapterError(
                    f"{name} does not fit: it brings {kind.removesuffix(WHOLE_SUFFIX)} as a whole, "
                    f"and of lora_whole_matrices = {total} it could have {total - used} ({where})"
                )
            least = -(-self.memory_bytes * (count + used) // total)
            raise AdapterError(
                f"{name} does not fit: {count} rows of {self.row_bytes[kind]:,} bytes for {kind}, "
                f"of {total} it could have {total - used} ({where}); lora_memory_bytes = "
                f"{self.memory_bytes:,}, with {least:,} it would"
            )


def _sum(needs: Sequence[Needs]) -> dict[str, int]:
    kinds = {kind for rows in needs for kind in rows}
    return {kind: sum(rows.get(kind, 0) for rows in needs) for kind in kinds}
