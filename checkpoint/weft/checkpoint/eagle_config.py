"""The `config.json` of an EAGLE-1 or EAGLE-2 head, checked against its target. Pure Python."""

from __future__ import annotations

import json
from pathlib import Path

from weft.checkpoint.config import ModelConfig
from weft.checkpoint.draft_config import HeadConfig, HeadKind, kind_of, read_layer
from weft.checkpoint.fields import Fields, read_json_file


class EagleConfig(HeadConfig):
    """Shape and arithmetic of a head (Li et al. 2024, EAGLE and EAGLE-2)."""

    __slots__ = ()

    @classmethod
    def load(cls, draft_dir: Path) -> EagleConfig:
        """Reads `config.json` of a directory."""
        return cls(**read_layer(eagle_fields(draft_dir)))

    def check_target(self, target: ModelConfig, where: Path) -> None:
        """Refuses a target that the head was not made for, as `HeadConfig.check_sizes` does."""
        self.check_sizes(target, where, ("hidden_size", self.hidden_size))

    def fingerprint(self) -> bytes:
        """Canonical bytes of everything that changes drafts and their KV."""
        fields = {"kind": "eagle", **self.values()}
        return json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()


def eagle_fields(draft_dir: Path) -> Fields:
    """The fields of a head's `config.json`; some files keep them one level deeper, in `model`."""
    fields = Fields(read_json_file(draft_dir / "config.json"), str(draft_dir))
    return fields.section("model") if fields.get("model_type") == "eagle" else fields


def head_kind(draft_dir: Path) -> HeadKind:
    """Kind of draft head in a directory, as from `kind_of`."""
    return kind_of(eagle_fields(draft_dir))
