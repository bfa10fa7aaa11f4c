"""The reference of the Python packages, from their sources: nothing is imported."""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import griffe
from markup import inline

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {
    "weft.contract": ROOT / "contract" / "weft" / "contract",
    "weft.checkpoint": ROOT / "checkpoint" / "weft" / "checkpoint",
    "weft.pages": ROOT / "pages" / "weft" / "pages",
    "weft.engine": ROOT / "engine" / "weft" / "engine",
    "weft.kernels": ROOT / "kernels" / "weft" / "kernels",
    "weft.common": ROOT / "services" / "common" / "weft" / "common",
    "weft.gateway": ROOT / "services" / "gateway" / "weft" / "gateway",
    "weft.decode": ROOT / "services" / "decode" / "weft" / "decode",
    "weft.prefill": ROOT / "services" / "prefill" / "weft" / "prefill",
    "weft.kvstore": ROOT / "services" / "kvstore" / "weft" / "kvstore",
    "weft.cli": ROOT / "cli" / "weft" / "cli",
    "weft.chaos": ROOT / "chaos" / "weft" / "chaos",
}
# It reports arguments that a class documents and its constructor takes.
logging.getLogger("griffe").setLevel(logging.ERROR)


def pages() -> Iterator[tuple[str, str]]:
    """(Name, Markdown) of a page for each folder of each package."""
    for package, folder in PACKAGES.items():
        for sub in [folder, *sorted(path for path in folder.rglob("*") if path.is_dir())]:
            modules = sorted(path for path in sub.glob("*.py") if path.name != "__main__.py")
            name = ".".join([package, *sub.relative_to(folder).parts])
            texts = [text for path in modules if (text := module_text(name, path))]
            if texts:
                yield name, "\n".join([f"# {name}", "", *texts])


def module_text(package: str, path: Path) -> str:
    """What a module has for others; empty where it has nothing."""
    is_package = path.stem == "__init__"
    name = package if is_package else f"{package}.{path.stem}"
    module = griffe.visit(name, filepath=path, code=path.read_text())
    lines = docstring(module)
    if not is_package:
        lines = [f"## {name}", "", *lines]
    for member in module.members.values():
        if member.is_public and not member.is_imported:
            lines += member_text(member, "###")
    return "\n".join(lines)


def member_text(member: griffe.Object | griffe.Alias, heading: str) -> list[str]:
    """A class, function or constant of a module."""
    if member.is_class:
        lines = [f"{heading} {member.name}", "", *docstring(member)]
        if "__init__" in member.members:
            lines += docstring(member.members["__init__"])
        values = [
            one
            for one in member.members.values()
            if one.is_attribute and one.is_public and (one.docstring or one.annotation)
        ]
        for value in values:
            text = (inline(value.docstring.value) if value.docstring else "").strip()
            kind = f": `{value.annotation}`" if value.annotation else ""
            lines.append(f"- `{value.name}`{kind}{'. ' + text if text else ''}")
        lines += [""] if values else []
        for method in member.members.values():
            if method.is_function and (method.is_public and not method.name.startswith("_")):
                lines += [*signature(method, f"{member.name}."), *docstring(method)]
        return lines
    if member.is_function:
        return [f"{heading} {member.name}", "", *signature(member, ""), *docstring(member)]
    if member.is_attribute and member.docstring:
        text = inline(member.docstring.value)
        return [f"`{member.name}`: {text}", ""]
    return []


def signature(function: griffe.Object | griffe.Alias, owner: str) -> list[str]:
    """The head of a function, in a block."""
    head = f"{owner}{function.name}"
    if "property" in function.labels:
        return ["```python", f"{head}: {function.returns}", "```", ""]
    parameters = [one for one in function.parameters if one.name not in ("self", "cls")]
    shown = [
        f"{'**' if one.kind is griffe.ParameterKind.var_keyword else ''}"
        f"{'*' if one.kind is griffe.ParameterKind.var_positional else ''}{one.name}"
        + (f": {one.annotation}" if one.annotation else "")
        + (f" = {one.default}" if one.default is not None and one.name not in ("args",) else "")
        for one in parameters
    ]
    text = f"{head}({', '.join(shown)}) -> {function.returns}"
    if len(text) > 90:
        text = f"{head}(\n" + "".join(f"    {one},\n" for one in shown) + f") -> {function.returns}"
    return ["```python", text, "```", ""]


def prose(text: str) -> list[str]:
    """Paragraphs of a docstring; what is indented stays a block, as diagrams are."""
    lines: list[str] = []
    for paragraph in re.split(r"\n\s*\n", inspect.cleandoc(text)):
        if paragraph.startswith("```"):
            lines += [paragraph, ""]
        elif all(line.startswith("    ") for line in paragraph.splitlines()):
            lines += ["```", inspect.cleandoc(paragraph), "```", ""]
        elif "\n    " in paragraph:
            first, *rest = re.split(r"\n(?=    )", paragraph, maxsplit=1)
            lines += [inline(first), "", "```", *rest, "```", ""]
        else:
            lines += [inline(paragraph), ""]
    return lines


def docstring(owner: griffe.Object | griffe.Alias) -> list[str]:
    """The docstring of a module, class or function, section by section."""
    if owner.docstring is None:
        return []
    lines: list[str] = []
    for section in owner.docstring.parse("google"):
        if section.kind is griffe.DocstringSectionKind.text:
            lines += prose(section.value)
            continue
        if isinstance(section.value, (str, griffe.DocstringAdmonition)):
            description = getattr(section.value, "description", section.value)
            lines += [f"*{section.title or section.kind.value}*: {inline(description)}", ""]
            continue
        lines += [f"*{section.kind.value.capitalize()}*", ""]
        for item in section.value:
            name = getattr(item, "name", "") or str(getattr(item, "annotation", "") or "")
            head = f"`{name}`: " if name else ""
            lines.append(f"- {head}{inline(str(item.description))}")
        lines.append("")
    return lines
