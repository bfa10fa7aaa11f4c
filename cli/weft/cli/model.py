"""`weft model`: lists, downloads, verifies and removes models."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column, Table
from weft.checkpoint import demo, hub
from weft.checkpoint.config import ModelConfig
from weft.checkpoint.digest import FileDigests, combine_digests, file_digest
from weft.checkpoint.dtypes import DTYPES, resolve_dtype
from weft.checkpoint.files import Progress as Report
from weft.checkpoint.files import weight_files
from weft.checkpoint.pooling import TASK_CHOICES
from weft.checkpoint.quantization import AT_LOAD, Quantization, resolve_quantization
from weft.checkpoint.resolve import resolve_model
from weft.checkpoint.transformers_config import TransformersConfig, check_trust
from weft.cli.tables import print_table
from weft.contract.errors import ModelError


def main(argv: Sequence[str]) -> int:
    arguments = _parser().parse_args(argv)
    out, err = Console(), Console(stderr=True)
    if arguments.action == "list":
        return _list(out)
    if arguments.action == "convert":
        return _convert(out, err, arguments.force)
    if arguments.action == "pull":
        return _pull(out, arguments.model)
    if arguments.action == "rm":
        return _remove(out, arguments.model)
    return _verify(out, err, arguments)


@contextmanager
def progress_bar(console: Console, title: str) -> Iterator[Report]:
    """A bar in bytes that appears with the first report; one line where there is no terminal."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
    )
    bar = Progress(*columns, console=console, transient=True)
    with ExitStack() as stack:

        def report(done_bytes: int, total_bytes: int) -> None:
            if not bar.tasks:
                bar.add_task(title)
                if console.is_terminal:
                    stack.enter_context(bar)
                else:
                    console.print(f"{title} ({total_bytes / 1e6:,.0f} MB)", highlight=False)
            bar.update(bar.task_ids[0], completed=done_bytes, total=total_bytes)

        yield report


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="weft model", description="Models that can be served, and their files."
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    actions.add_parser("list", help="show the demo model and the models in the hub's cache")
    pull = actions.add_parser("pull", help="download a model, or what is missing of it")
    pull.add_argument("model", type=_hub_name, metavar="ORG/NAME[@REVISION]")
    remove = actions.add_parser("rm", help="remove a downloaded model from the hub's cache")
    remove.add_argument("model", type=_hub_name, metavar="ORG/NAME[@REVISION]")
    verify = actions.add_parser(
        "verify",
        help="read a model's files, check their forms and show digests; a downloaded one's are "
        "compared with the hub's checksums",
    )
    verify.add_argument(
        "model", nargs="?", default=demo.DEMO_NAME, metavar="demo|DIR|ORG/NAME[@REVISION]"
    )
    verify.add_argument(
        "--dtype", default="auto", choices=("auto", *DTYPES), help="part of the model's digest"
    )
    verify.add_argument(
        "--quantization",
        default="auto",
        choices=("auto", *AT_LOAD),
        help="part of the model's digest",
    )
    verify.add_argument(
        "--task",
        default="auto",
        choices=TASK_CHOICES,
        help="what the model is to serve; auto = what its files are for",
    )
    verify.add_argument(
        "--trust-remote-code",
        action="store_true",
        help="run the modelling code that the model's directory brings",
    )
    convert = actions.add_parser("convert", help="convert the demo model, unless that was done")
    convert.add_argument("--force", action="store_true", help="convert it again")
    return parser


def _hub_name(text: str) -> hub.HubName:
    name = hub.HubName.parse(text)
    if name is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a name on the hub: organisation/name, or organisation/name@revision"
        )
    return name


def _list(out: Console) -> int:
    folder = demo.demo_dir()
    table = Table("--model", "state", "size", Column("folder", overflow="fold"), box=None)
    if demo.is_complete(folder):
        state, text = "converted", _megabytes(_size(folder))
    else:
        state, text = _source_state(), ""
    table.add_row(demo.DEMO_NAME, state, text, str(folder))
    for model in hub.cached_models():
        revision = model.refs[0] if model.refs else model.name.revision
        name = model.name.repository + ("" if revision == "main" else f"@{revision}")
        state = model.problem or "downloaded"
        table.add_row(name, state, _megabytes(model.num_bytes), str(model.folder))
    print_table(out, table)
    out.print(
        "\nAny Hugging Face folder of a supported architecture is served by --model DIR, and a "
        "hub's by --model ORG/NAME[@REVISION].",
        soft_wrap=True,
        markup=False,
    )
    return 0


def _pull(out: Console, name: hub.HubName) -> int:
    out.print(str(hub.pull(name)), soft_wrap=True, highlight=False)
    return 0


def _remove(out: Console, name: hub.HubName) -> int:
    out.print(f"{_megabytes(hub.remove(name))} are free again", highlight=False)
    return 0


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.0f} MB"


def _source_state() -> str:
    try:
        demo.find_source()
    except ModelError as error:
        return error.message
    return "not converted yet"


def _convert(out: Console, err: Console, force: bool) -> int:
    with progress_bar(err, "converting the demo model") as report:
        folder = demo.convert_demo(report, force=force)
    out.print(str(folder), soft_wrap=True, highlight=False)
    return 0


def _verify(out: Console, err: Console, arguments: argparse.Namespace) -> int:
    """Compares the demo model's digests with those of its conversion, and a hub's with the hub's
    checksums.
    """
    model, quantization = arguments.model, arguments.quantization
    is_demo = model == demo.DEMO_NAME
    folder = demo.demo_dir() if is_demo else _verified_folder(out, model)
    expected = demo.manifest_digests() if is_demo else {}
    config = ModelConfig.load(folder)
    check_trust(config, trusts=arguments.trust_remote_code)
    chosen = resolve_quantization(quantization, config.quantization)
    resolved = resolve_dtype(arguments.dtype, quantization=chosen)
    weights = weight_files(folder)
    others = {folder / name for name in expected} - set(weights)
    with progress_bar(err, "reading") as report:
        digests = _read_digests([*sorted(others), *weights], report)
    changed = {name for name in expected if digests[folder / name].hex() != expected[name]}
    for path, digest in digests.items():
        state = " CHANGED" if path.name in changed else " ok" if path.name in expected else ""
        out.print(f"{digest.hex()}  {path.name}{state}", soft_wrap=True, highlight=False)
    if changed:
        raise ModelError("files have changed; `weft model convert --force` makes them again")
    scheme = b"" if chosen is None else _fingerprint(chosen, resolved)
    with FileDigests(weights, trusts_records=False) as found:
        name = combine_digests(config, resolved, found.wait(), scheme).hex()
    numbers = resolved if chosen is None else f"{resolved}, {chosen.format}"
    text = f"{config.architecture}, {numbers}, model digest {name}"
    out.print(text, soft_wrap=True, highlight=False)
    _check_forms(folder, quantization, arguments.task, arguments.trust_remote_code)
    out.print(path_of(folder, config), soft_wrap=True, highlight=False)
    return 0


def path_of(folder: Path, config: ModelConfig) -> str:
    """Says whose code computes a model. Compares what transformers computes over pages with plain
    transformers; raises ModelError if it differs.
    """
    if not isinstance(config, TransformersConfig):
        return "computed by Weft's own layers"
    from weft.engine.model.archs.by_transformers.compare import compare_tokens

    whose = config.remote_class or "transformers' code"
    found = compare_tokens(folder, config)
    return (
        f"computed by {whose} with Weft's attention; {found.equal} of {found.of} next tokens equal "
        "plain transformers'"
    )


def _check_forms(folder: Path, quantization: str, task: str, trusts: bool) -> None:
    """Checks everything but the weights' numbers: the headers of their files (sizes, names,
    shapes), the tokenizer, the chat template and the defaults of sampling. Raises ModelError, or
    ConfigError if the model does not support this quantisation.
    """
    from weft.engine.model.loader import check_weights
    from weft.gateway.text.model_card import load_model_card

    load_model_card(folder)
    check_weights(folder, quantization, task, trust_remote_code=trusts)


def _fingerprint(quantization: Quantization, dtype: str) -> bytes:
    """The part of the model's digest that depends on how this machine's CPU holds the weights."""
    import torch
    from weft.engine.model.weights.schemes.registry import scheme_of

    return scheme_of(quantization).fingerprint(getattr(torch, dtype), torch.device("cpu"))


def _verified_folder(out: Console, model: str) -> Path:
    folder = resolve_model(model)
    for cached in hub.cached_models():
        if cached.folder != folder:
            continue
        if changed := hub.check_files(cached):
            raise ModelError(
                f"{', '.join(changed)} in {folder} differ from the hub's; remove the model with "
                f"`weft model rm {cached.name}` and pull it again"
            )
        out.print(f"all files are the hub's of commit {cached.name.revision}", highlight=False)
    return folder


def _read_digests(paths: Sequence[Path], report: Report) -> dict[Path, bytes]:
    """BLAKE2b-256 of each file; ignores digests that an earlier run has stored."""
    digests: dict[Path, bytes] = {}
    done_bytes = total_bytes = 0

    def advance(read_bytes: int) -> None:
        report(done_bytes + read_bytes, total_bytes)

    try:
        total_bytes = sum(path.stat().st_size for path in paths)
        for path in paths:
            digests[path] = file_digest(path, advance)
            done_bytes += path.stat().st_size
    except OSError as error:
        raise ModelError(f"cannot read the model's files: {error}") from error
    return digests
