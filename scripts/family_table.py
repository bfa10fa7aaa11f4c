"""Writes docs/reference/architectures.md: what was shown of every architecture, and its files.

pytest --full tests/engine/models/test_family_table.py --junitxml=results.xml
pytest tests/gpu/engine/test_gpu_families.py tests/gpu/engine/test_gpu_hybrid.py --junitxml=gpu.xml
python scripts/family_table.py results.xml gpu.xml

What the results lack stays as the page has it.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from weft.checkpoint.architectures import configuration_reader, supported_architectures
from weft.checkpoint.config import ModelConfig
from weft.testing.models.family_configs import family_configs

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reference" / "architectures.md"
COLUMNS = (
    "float32 tokens", "bfloat16 near-ties", "chunked prefill", "prefix hit", "P/D over NIXL",
    "n-gram drafts", "LoRA of attention", "FP8 by rows", "on a GPU",
)  # fmt: skip
MEANINGS = (
    "Models are tiny, with random weights, and texts are short. *LoRA of attention*: an adapter of "
    'PEFT on the projections of attention that there are; "yes: o_proj alone" where adapters can '
    "change no other. Adapters of MLPs, experts, embeddings and LM heads are not part of it. "
    "*FP8 by rows*: a copy that the test itself quantised, in the form of compressed-tensors with "
    "one scale for each row; experts in one tensor stay floats. Other forms "
    "([quantisation](../quantisation.md)) are tested on a few architectures."
)
HEARING = (
    "Models of audio have tests of their own, tests/engine/audio and tests/gpu/engine/test_gpu_"
    "hearing.py: WhisperForConditionalGeneration, VoxtralForConditionalGeneration and "
    "Qwen2AudioForConditionalGeneration draw transformers' tokens in float32, in chunks, behind "
    "cached pages and from a prefill worker; Voxtral and Qwen2-Audio also on two ranks."
)
FOLDERS = (
    "checkpoint/weft/checkpoint/families",
    "engine/weft/engine/model/archs",
    "engine/weft/engine/model/layers",
)
_UNKNOWN = "not compared"
_ORDER = ("-", "yes", "yes:", "refused:", "failed")
"""Beginnings of cells, the worst last."""


def cells(results: Sequence[Path]) -> dict[str, dict[str, str]]:
    """By architecture and column: yes, `yes: limit`, failed, or `refused: reason`. Where several
    families have an architecture the worst counts; a test that a later file repeats counts as
    there.
    """
    cases = {
        (case.get("classname"), case.get("name")): case
        for path in results
        for case in ElementTree.parse(path).iter("testcase")
    }
    table: dict[str, dict[str, str]] = defaultdict(dict)
    for case in cases.values():
        said = {p.get("name", ""): p.get("value", "") for p in case.iter("property")}
        if "column" not in said:
            continue
        has_failed = case.find("failure") is not None or case.find("error") is not None
        limited = f"yes: {said['limit']}" if "limit" in said else "yes"
        found = f"refused: {said['refused']}" if "refused" in said else limited
        found = "failed" if has_failed else found
        row, column = table[said["architecture"]], said["column"]
        before = row.get(column, "-")
        if _badness(found) > _badness(before):
            row[column] = found
    return table


def _badness(cell: str) -> int:
    return _ORDER.index(cell.split(" ")[0])


def kept_cells(text: str) -> dict[str, dict[str, str]]:
    """The cells that a page has, as `cells` has them; of architectures that there are no more,
    none.
    """
    table, known = {}, supported_architectures()
    for line in text.splitlines():
        name, *row = (cell.strip() for cell in line.strip("| ").split(" | "))
        if len(row) == len(COLUMNS) and name in known:
            pairs = zip(COLUMNS, row, strict=True)
            table[name] = {column: cell for column, cell in pairs if cell != _UNKNOWN}
    return table


def feature_lines(table: Mapping[str, Mapping[str, str]]) -> Iterator[str]:
    """The table of features."""
    yield f"| architecture | {' | '.join(COLUMNS)} |"
    yield f"| --- |{' --- |' * len(COLUMNS)}"
    for architecture in sorted(table):
        row = (table[architecture].get(column, _UNKNOWN) for column in COLUMNS)
        yield f"| {architecture} | {' | '.join(row)} |"


def others(table: Mapping[str, Mapping[str, str]]) -> str:
    """Names that are read by the reader of an architecture of the table."""
    readers = {configuration_reader(name): name for name in sorted(table)}
    found = []
    for name in supported_architectures():
        reader = configuration_reader(name)
        if name not in table and reader is not None and reader in readers:
            found.append(f"{name} (as {readers[reader]})")
    return f"Also by the same readers: {', '.join(found)}."


def file_lines() -> Iterator[str]:
    """The table of files."""
    yield "| file | lines |"
    yield "| --- | --- |"
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).glob("*.py")):
            count = len(path.read_text().splitlines())
            if count > 1:
                yield f"| {path.relative_to(ROOT)} | {count} |"


def parts_of(record: Any) -> Iterator[str]:
    """The parts that a configuration asks for: fields that are not at their defaults."""
    for field in fields(record):
        value, name = getattr(record, field.name), f"{type(record).__name__}.{field.name}"
        values = value if isinstance(value, tuple) else (value,)
        for inner in (one for one in values if is_dataclass(one)):
            yield from parts_of(inner)
        default = field.default
        if field.default_factory is not MISSING:
            default = field.default_factory()
        if default is not MISSING and value != default:
            yield name


def users() -> dict[str, set[str]]:
    """The readers that use each part, in the models that tests make."""
    found: dict[str, set[str]] = defaultdict(set)
    for raw in family_configs().values():
        config = ModelConfig.from_dict(raw)
        reader = configuration_reader(config.architecture)
        if config.decoder is None or reader is None:
            continue
        records = [config.decoder, config.moe, config.latent]
        for part in {p for record in records if record is not None for p in parts_of(record)}:
            found[part].add(reader.__module__.rpartition(".")[2])
    return found


def lone_lines() -> Iterator[str]:
    """The table of parts that only one family has."""
    yield "| part | its user |"
    yield "| --- | --- |"
    for part, readers in sorted(users().items()):
        if len(readers) == 1 and not part.startswith("RopeConfig."):
            yield f"| {part} | {next(iter(readers))} |"


def page(results: Sequence[Path]) -> str:
    """The page."""
    table = kept_cells(PAGE.read_text()) if PAGE.exists() else {}
    for architecture, row in cells(results).items():
        table[architecture] = {**table.get(architecture, {}), **row}
    parts = (
        "# Architectures",
        "Made by `scripts/family_table.py`, which names the tests; cells that its last run lacks "
        "are older.",
        "## Features",
        MEANINGS,
        "\n".join(feature_lines(table)),
        others(table),
        HEARING,
        "## Files",
        "\n".join(file_lines()),
        "## Parts without a second user",
        "\n".join(lone_lines()),
    )
    return "\n\n".join(parts) + "\n"


def main() -> int:
    """Writes the page; exit status 1 if a cell failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path, nargs="+", help="JUnit XML of the tests")
    text = page(parser.parse_args().results)
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    PAGE.write_text(text)
    return int("| failed |" in text)


if __name__ == "__main__":
    sys.exit(main())
