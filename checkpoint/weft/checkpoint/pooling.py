"""How a model turns hidden states into vectors, read from the files of sentence-transformers.

Pure Python: the gateway reads prompts and limits here without importing torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from weft.checkpoint.architectures import encoder_stem, is_bidirectional, is_headless
from weft.checkpoint.config import ModelConfig
from weft.checkpoint.fields import Fields, fields_of_file, read_json, read_json_file
from weft.contract.errors import ModelError
from weft.contract.tasks import Output, Pooling, Task

_MODES: Mapping[str, Pooling] = {"cls": "first", "mean": "mean", "lasttoken": "last"}
_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
ActivationName = Literal["identity", "tanh", "relu", "gelu", "gelu_tanh", "quick_gelu", "silu"]
_ACTIVATIONS: Mapping[str, ActivationName] = {
    "Identity": "identity",
    "Tanh": "tanh",
    "ReLU": "relu",
    "GELU": "gelu",
    "SiLU": "silu",
}
_TOKEN_HEADS: Mapping[Output, str] = {"sparse": "sparse_linear", "multi_vector": "colbert_linear"}
"""Names of files with heads of tokens, as BGE-M3's authors use them."""
TASK_CHOICES = ("auto", "generate", "embed", "classify", "score")


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseConfig:
    """A linear layer that embeddings go through, from a folder of its own."""

    folder: Path
    in_features: int
    out_features: int
    bias: bool
    activation: ActivationName


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingConfig:
    """Settings of a model's vectors, read from its directory."""

    task: Task
    pooling: Pooling
    normalises: bool
    is_encoder: bool = False
    """Whether tokens also attend to later tokens, so that prompts are computed whole."""
    token_heads: Mapping[Output, Path] = field(default_factory=dict)
    """Files of the linear layers that compute lexical weights and vectors of each token."""
    dense: tuple[DenseConfig, ...] = ()
    """Layers between pooling and normalisation, in order."""
    prompts: Mapping[str, str] = field(default_factory=dict)
    """Texts that may precede inputs, by name."""
    default_prompt: str = ""
    """The text that precedes inputs that name none; empty: no text."""
    max_tokens: int | None = None
    """Longest input; None: the model's context."""
    has_bare_scores: bool = False
    """classify: whether scores of pairs are the head's values instead of probabilities."""
    true_token_id: int | None = None
    """score: the token that means that a document is relevant; None: `yes`."""
    false_token_id: int | None = None
    """score: the token that means the contrary; None: as the model was trained, `no` or none."""


def load_pooling(model_dir: Path, task: str = "auto") -> PoolingConfig:
    """Reads modules.json and the files that it names, where there are any. `task` auto means the
    task of the files; for generate no file is read.
    """
    if task == "generate":
        return PoolingConfig(task="generate", pooling="last", normalises=False)
    raw = read_json_file(model_dir / "config.json", may_lack=True)
    names = raw.get("architectures") or [""]
    architecture = names[0] if isinstance(names, list) and isinstance(names[0], str) else ""
    modules = _modules(model_dir)
    kinds = [kind for kind, _ in modules]
    found = _task_of(architecture, kinds) if task == "auto" else _checked_task(task)
    if found == "classify" and not architecture.endswith("ForSequenceClassification"):
        raise ModelError(
            f"{model_dir}: the task is classify, but {architecture or 'the model'} has no "
            "classification head",
            param="task",
        )
    settings = read_json_file(model_dir / "config_sentence_transformers.json", may_lack=True)
    lengths = read_json_file(model_dir / "sentence_bert_config.json", may_lack=True)
    limits = Fields(lengths, str(model_dir))
    prompts, default = _prompts(settings, str(model_dir))
    most = limits.positive("max_seq_length") if "max_seq_length" in limits else None
    is_encoder = is_bidirectional(raw)
    pooling: Pooling = "mean" if is_encoder and found == "embed" else "last"
    if is_encoder and found == "classify":
        pooling = "first" if encoder_stem(architecture) else "last"
        if raw.get("classifier_pooling") == "mean" or raw.get("pooling") == "avg":
            pooling = "mean"
    config: dict[str, Any] = {}
    if found == "embed" and modules:
        config = _of_modules(model_dir, modules)
    elif found == "score" and "LogitScore" in kinds:
        config = _of_logit_score(model_dir, modules)
    return PoolingConfig(
        **{
            "task": found,
            "pooling": pooling,
            "normalises": not modules,
            "is_encoder": is_encoder,
            "token_heads": _token_heads(model_dir) if found == "embed" else {},
            "prompts": prompts,
            "default_prompt": default,
            "max_tokens": most,
            "has_bare_scores": _has_bare_scores(raw),
            **config,
        }
    )


def with_head_for(task: Task, config: ModelConfig, model_dir: Path) -> ModelConfig:
    """The configuration with the head that the task needs; ModelError if the model has none."""
    if task == "embed" and config.head == "tokens":
        return replace(config, head="none")
    if task in ("generate", "score") and config.is_encoder:
        raise ModelError(
            f"{model_dir}: tokens of {config.architecture} also attend to later ones, so it cannot "
            f"serve the task {task}; give --task embed",
            param="task",
        )
    if task in ("generate", "score") and config.head != "tokens":
        raise ModelError(
            f"{model_dir}: {config.architecture} has no LM head, which the task {task} needs; "
            "load it with --task auto",
            param="task",
        )
    return config


def _has_bare_scores(raw: Mapping[str, Any]) -> bool:
    own = raw.get("sentence_transformers")
    named = own.get("activation_fn") if isinstance(own, dict) else None
    named = named or raw.get("sbert_ce_default_activation_function")
    return isinstance(named, str) and named.endswith("Identity")


def _task_of(architecture: str, kinds: list[str]) -> Task:
    if "LogitScore" in kinds:
        return "score"
    if architecture.endswith("ForSequenceClassification"):
        return "classify"
    if "Pooling" in kinds or is_headless(architecture) or architecture.endswith("ForMaskedLM"):
        return "embed"
    return "generate"


def _checked_task(task: str) -> Task:
    for known in ("generate", "embed", "classify", "score"):
        if task == known:
            return known
    raise ModelError(f"task: {task!r}; expected one of {', '.join(TASK_CHOICES)}", param="task")


def _of_modules(model_dir: Path, modules: list[tuple[str, Path]]) -> dict[str, Any]:
    config: dict[str, Any] = {"normalises": False}
    dense: list[DenseConfig] = []
    for kind, folder in modules:
        if kind == "Transformer":
            continue
        if config["normalises"]:
            raise ModelError(f"{model_dir}/modules.json: {kind} behind Normalize is not supported")
        if kind == "Pooling":
            config["pooling"] = _pooling(fields_of_file(folder / "config.json"))
        elif kind == "Dense":
            dense.append(_dense(folder, fields_of_file(folder / "config.json")))
        elif kind == "Normalize":
            config["normalises"] = True
        elif kind != "Dropout":
            raise ModelError(
                f"{model_dir}/modules.json: {kind} is not supported; Transformer, Pooling, Dense "
                "and Normalize are"
            )
    return {**config, "dense": tuple(dense)}


def _of_logit_score(model_dir: Path, modules: list[tuple[str, Path]]) -> dict[str, Any]:
    folder = next(folder for kind, folder in modules if kind == "LogitScore")
    fields = fields_of_file(folder / "config.json")
    names = ("true_token_id", "false_token_id")
    return {name: fields.count(name, 0) if name in fields else None for name in names}


def _modules(model_dir: Path) -> list[tuple[str, Path]]:
    path = model_dir / "modules.json"
    listed = read_json(path) if path.exists() else []
    if not isinstance(listed, list) or not all(isinstance(one, dict) for one in listed):
        raise ModelError(f"{path}: expected a list of objects")
    found = []
    for one in listed:
        kind, folder = str(one.get("type", "")).rsplit(".", 1)[-1], str(one.get("path", ""))
        if ".." in Path(folder).parts or Path(folder).is_absolute():
            raise ModelError(f"{path}: {folder!r} leads out of the model's directory")
        found.append((kind, model_dir / folder))
    return found


def _token_heads(model_dir: Path) -> dict[Output, Path]:
    files = {
        output: [model_dir / f"{name}.{end}" for end in ("safetensors", "pt")]
        for output, name in _TOKEN_HEADS.items()
    }
    found = {output: [path for path in paths if path.exists()] for output, paths in files.items()}
    return {output: paths[0] for output, paths in found.items() if paths}


def _pooling(fields: Fields) -> Pooling:
    modes = fields.get("pooling_mode")
    if modes is None:
        modes = [mode for flag, mode in _FLAGS.items() if fields.flag(flag, False)] or ["mean"]
    modes = [modes] if isinstance(modes, str) else modes
    if not isinstance(modes, list) or len(modes) != 1 or modes[0] not in _MODES:
        raise fields.error(
            "pooling_mode", f"{modes!r} is not supported; one of {', '.join(_MODES)}"
        )
    if not fields.flag("include_prompt", True):
        raise fields.error("include_prompt", "false is not supported")
    return _MODES[modes[0]]


def _dense(folder: Path, fields: Fields) -> DenseConfig:
    name = fields.text("activation_function", "torch.nn.modules.activation.Tanh")
    activation = _ACTIVATIONS.get(name.rsplit(".", 1)[-1])
    if activation is None:
        raise fields.error("activation_function", f"{name!r} is not supported")
    if fields.flag("use_residual", False):
        raise fields.error("use_residual", "is not supported")
    for end in ("input", "output"):
        if fields.text(f"module_{end}_name", "sentence_embedding") != "sentence_embedding":
            raise fields.error(f"module_{end}_name", "only sentence_embedding is supported")
    return DenseConfig(
        folder=folder,
        in_features=fields.positive("in_features"),
        out_features=fields.positive("out_features"),
        bias=fields.flag("bias", True),
        activation=activation,
    )


def _prompts(settings: Mapping[str, Any], where: str) -> tuple[Mapping[str, str], str]:
    prompts, name = settings.get("prompts") or {}, settings.get("default_prompt_name")
    where = f"{where}/config_sentence_transformers.json"
    if not isinstance(prompts, dict) or not all(isinstance(one, str) for one in prompts.values()):
        raise ModelError(f"{where}: prompts: expected an object of texts")
    if name is not None and name not in prompts:
        raise ModelError(f"{where}: default_prompt_name: there is no prompt {name!r}")
    return prompts, "" if name is None else prompts[name]
