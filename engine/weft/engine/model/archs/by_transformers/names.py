"""A checkpoint's tensors under the names and in the shapes that transformers' modules have."""

from __future__ import annotations

import re
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from weft.contract.errors import ModelError
from weft.engine.model.weights.reader import CheckpointReader, TensorSlice, Wrapped


class Converted(Wrapped):
    """A reader of a checkpoint as transformers renames and converts it while it loads."""

    def __init__(self, reader: CheckpointReader, names: Sequence[str], model: Any) -> None:
        """Finds out from which tensors of the checkpoint each of the model's is made.

        Args:
            names: The checkpoint's tensors.
            model: A causal language model of transformers.
        """
        super().__init__(reader)
        transforms = get_model_conversion_mapping(model)
        renamings = [one for one in transforms if isinstance(one, WeightRenaming)]
        converters = [one for one in transforms if isinstance(one, WeightConverter)]
        self._by_pattern = {pattern: one for one in converters for pattern in one.source_patterns}
        self._model = model
        known = model.state_dict()
        self._sources: dict[str, list[tuple[str, str | None]]] = {}
        ignored = [
            re.compile(pattern) for pattern in model._keys_to_ignore_on_load_unexpected or ()
        ]
        for name in sorted(names, key=_natural):
            target, pattern = rename_source_key(
                name, renamings, converters, model.base_model_prefix, known
            )
            self._sources.setdefault(target, []).append((name, pattern))
            if target not in known and any(one.search(name) for one in ignored):
                reader.skip(f"{name.rpartition('.')[0]}.")
        self._made: dict[str, torch.Tensor] = {}

    def has(self, name: str) -> bool:
        return name in self._sources or self._target(name) is not None

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        source = self._renamed(name)
        return None if source is None else self._reader.shape_of(source)

    def dtype_of(self, name: str) -> torch.dtype | None:
        source = self._renamed(name)
        return None if source is None else self._reader.dtype_of(source)

    def read_into(self, part: TensorSlice, out: torch.Tensor) -> None:
        source = self._renamed(part.name)
        if source is not None or self._target(part.name) is None:
            self._reader.read_into(part._replace(name=source or part.name), out)
            return
        whole = self._converted(part.name, out)
        if whole.shape != part.shape:
            raise ModelError(
                f"{part.name} becomes {tuple(whole.shape)}, the model asks for {part.shape}"
            )
        out.copy_(whole[part.slices] if part.slices else whole)

    def _renamed(self, name: str) -> str | None:
        """The one tensor that a parameter is, where nothing else than its name changes."""
        found = self._sources.get(name, [])
        return found[0][0] if len(found) == 1 and found[0][1] is None else None

    def _target(self, name: str) -> str | None:
        """The first parameter of the conversion that makes a parameter; None: there is none."""
        if self._sources.get(name, [("", None)])[0][1] is not None:
            return name
        for target, sources in self._sources.items():
            pattern = sources[0][1]
            if pattern is None:
                continue
            targets = self._by_pattern[pattern].target_patterns
            if len(targets) > 1 and name in {
                target.replace(targets[0], other, 1) for other in targets[1:]
            }:
                return target
        return None

    def _converted(self, name: str, out: torch.Tensor) -> torch.Tensor:
        if name not in self._made:
            target = self._target(name)
            assert target is not None
            sources = self._sources[target]
            pattern = sources[0][1]
            assert pattern is not None
            converter = deepcopy(self._by_pattern[pattern])
            for source, of in sources:
                shape = self._reader.shape_of(source) or ()
                tensor = torch.empty(shape, dtype=out.dtype, device=out.device)
                self._reader.read_into(TensorSlice(source, shape), tensor)
                assert of is not None
                converter.add_tensor(target, source, of, tensor)
            made = converter.convert(target, model=self._model, config=self._model.config)
            # Only the parts of one conversion are kept, which are read after one another.
            self._made = {
                one: value[0] if isinstance(value, list) else value for one, value in made.items()
            }
        if name not in self._made:
            raise ModelError(f"{name} is not among {', '.join(self._made)}, which are made with it")
        return self._made[name]


def _natural(name: str) -> list[tuple[int, str]]:
    """A key that orders numbers in names by their values."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]
