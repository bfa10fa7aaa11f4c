"""The parts of a model that the gateway needs: tokenizer, chat template, limits. No weights."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from weft.checkpoint.end_tokens import end_token_ids
from weft.checkpoint.files import num_parameters
from weft.checkpoint.pooling import PoolingConfig, load_pooling
from weft.checkpoint.tokenizer_files import read_json, read_tokenizer
from weft.checkpoint.vocabularies import TOKENIZER_FILE
from weft.contract.errors import ModelError
from weft.contract.request import PARAMETERS, SAMPLING_DEFAULTS, Reasoning
from weft.gateway.media.containers import EXTRA, is_installed
from weft.gateway.media.hearing import ClipPrompts, load_clip_prompts
from weft.gateway.media.load import ImagePrompts, load_image_prompts
from weft.gateway.media.prompts import MediaPrompts
from weft.gateway.media.video_forms import VideoPrompts, load_video_prompts
from weft.gateway.request import FileKind
from weft.gateway.text.answer.formats import (
    FORMATS,
    REASONING_FORMATS,
    ReasoningFormat,
    ToolFormat,
    find_reasoning,
    find_tool_format,
)
from weft.gateway.text.control_tokens import ControlTokens
from weft.gateway.text.detokenize import Vocabulary
from weft.gateway.text.speech import SpeechTokens, load_speech
from weft.gateway.text.template import ChatTemplate

_log = logging.getLogger(__name__)

_DEFAULT_CONTEXT_TOKENS = 2048
_SHOWN_CHARS = 100
_UNWEIGHTED = ("cls_token", "eos_token", "pad_token", "unk_token")
"""Names of special tokens without a lexical weight, as in FlagEmbedding."""
_DEFAULT_TEMPLATE, _TOOL_TEMPLATE = "default", "tool_use"
AUTO = "auto"
"""Setting by which the chat template decides the parser."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """The facts about a model that do not change while the gateway runs."""

    name: str
    tokenizer: Tokenizer
    vocabulary: Vocabulary
    controls: ControlTokens
    template: ChatTemplate | None
    """Chat template; None: the model has none, and chat requests are refused."""
    tool_template: ChatTemplate | None
    """Chat template for requests with tools; None: `template` is used."""
    tool_format: ToolFormat
    """Format in which the model writes tool calls."""
    reasoning: ReasoningFormat | None
    """Format of the reasoning with which answers may begin, and which is shown separately; None:
    the model writes none.
    """
    tool_parser: str
    reasoning_parser: str
    """Settings from which the two formats follow."""
    json_whitespace: str | None
    """`Constraint.whitespace` of requests that do not give one."""
    sampling: Mapping[str, float]
    """Sampling parameters for requests that do not give them."""
    eos_ids: frozenset[int]
    vocabulary_size: int
    """First invalid id; the model's size, which may exceed the tokenizer's."""
    max_context_tokens: int
    pooling: PoolingConfig
    """What its files are for, and how they make vectors."""
    pooling_problem: str = ""
    """Why these files cannot be used, so that the model can only generate; empty: they can."""
    images: ImagePrompts | None = None
    """How the model takes images; None: it reads text alone."""
    images_problem: str = ""
    """Why its images are not served; empty: they are, or it has none."""
    audio: ClipPrompts | None = None
    """How the model takes clips of audio in chats; None: it does not hear."""
    audio_problem: str = ""
    """Why its audio is not served; empty: it is, or it has none."""
    videos: VideoPrompts | None = None
    """How the model takes videos; None: it does not."""
    videos_problem: str = ""
    """Why videos are not served; empty: they are, or it takes none."""
    speech: SpeechTokens | None = None
    """How the model transcribes speech; None: it does not."""
    model_type: str = ""
    """`model_type` of config.json."""
    hidden_size: int = 0
    """Width of the model; 0: config.json does not say."""
    num_parameters: int = 0
    """Number of weights by the headers of safetensors files; 0: unknown, as of GGUF files and of
    quantised weights.
    """
    unweighted_ids: frozenset[int] = frozenset()
    """Special tokens that get no lexical weight."""
    labels: tuple[str, ...] = ()
    """Names of the classes of its classification head."""
    max_token_bytes: int
    """Length of the longest token, which bounds the number of tokens of a text from below; 0: no
    such bound.
    """
    created: int
    """Unix time of the load, in seconds."""

    @property
    def media(self) -> Mapping[FileKind, MediaPrompts]:
        """How the model takes media in chats, by their kinds; others it does not take."""
        known: Mapping[FileKind, MediaPrompts | None] = {
            "image": self.images,
            "audio": self.audio,
            "video": self.videos,
        }
        return {kind: one for kind, one in known.items() if one is not None}

    @property
    def unread(self) -> Mapping[FileKind, str]:
        """The kinds of media that it does not take, and why not."""
        problems: Mapping[FileKind, str] = {
            "image": self.images_problem or f"the model `{self.name}` takes no images",
            "audio": self.audio_problem or f"the model `{self.name}` does not hear",
            "video": self.videos_problem or f"the model `{self.name}` takes no videos",
        }
        return {kind: why for kind, why in problems.items() if kind not in self.media}

    @property
    def reads(self) -> str:
        """What it takes in chats, for messages."""
        if not self.media:
            return "text alone"
        names = {"image": "images", "audio": "audio", "video": "videos"}
        return " and ".join(["text", *(names[kind] for kind in self.media)])

    @property
    def is_harmony(self) -> bool:
        """Whether the model's answers are messages in channels."""
        return self.tool_format.is_harmony or (
            self.reasoning is not None and self.reasoning.is_harmony
        )

    @property
    def answer_reasoning(self) -> Reasoning | None:
        """The tokens that mark where an answer begins after its reasoning; None: it has no
        reasoning, or no tokens mark its end.
        """
        if self.reasoning is None:
            return None
        added, begin = self.vocabulary.added_ids, self.reasoning.opening_token
        if self.reasoning.is_harmony:
            channel, message = added.get("<|channel|>"), added.get("<|message|>")
            if channel is None or message is None:
                return None
            final = self.tokenizer.encode("final", add_special_tokens=False).ids
            return Reasoning(end=(channel, *final), until=message)
        end = added.get(self.reasoning.closer)
        return None if end is None else Reasoning(begin=added.get(begin), end=(end,))

    @property
    def call_opener_ids(self) -> tuple[int, ...]:
        """The special tokens with which tool calls begin, if there are any."""
        added, form = self.vocabulary.added_ids, self.tool_format
        return tuple(added[one] for one in form.openers or form.beginnings if one in added)


def load_model_card(
    folder: Path,
    name: str = "",
    max_context_tokens: int | None = None,
    *,
    tool_parser: str = AUTO,
    reasoning_parser: str = AUTO,
    has_own_sampling: bool = True,
    chat_template: str = "",
    json_whitespace: str | None = None,
) -> ModelCard:
    """Reads a Hugging Face model directory.

    Args:
        folder: Has tokenizer.json and config.json; tokenizer_config.json, chat_template.jinja and
            generation_config.json are used if they are there.
        name: Name under which it is served; empty: the folder's.
        max_context_tokens: Bound below the model's own.
        tool_parser: Name of a `ToolFormat`; "auto": the one that the chat template teaches.
        reasoning_parser: Name of a `ReasoningFormat`, "none", or "auto": the one of the chat
            template.
        has_own_sampling: Whether generation_config.json sets the defaults of sampling.
        chat_template: A file with the template of chats, or the name of one of the folder's; empty:
            the one called `default`.
        json_whitespace: `Constraint.whitespace` of requests that do not set it.

    Raises:
        ModelError: A file is missing or cannot be understood; the message names it.
    """
    if not folder.is_dir():
        raise ModelError(f"{folder}: no such directory; --model-dir takes a Hugging Face model")
    whole_config = read_json(folder / "config.json", required=True)
    config = _text_config(whole_config)
    generation_config = read_json(folder / "generation_config.json")
    context = _integer(config, "max_position_embeddings", _DEFAULT_CONTEXT_TOKENS)
    pooling, problem = _pooling(folder)
    parts, specials = _read_tokenizer(folder, tool_parser, reasoning_parser, chat_template)
    tokenizer: Tokenizer = parts["tokenizer"]
    images, images_problem = _images(folder, whole_config, tokenizer)
    audio, audio_problem = _audio(folder, whole_config, tokenizer)
    videos, videos_problem = _videos(folder, whole_config, tokenizer)
    speech = load_speech(folder, whole_config, generation_config, tokenizer)
    context = context if speech is None else speech.context_tokens
    return ModelCard(
        name=name or folder.resolve().name,
        **parts,
        controls=_controls(parts, [one for one in (images, audio, videos) if one is not None]),
        tool_parser=tool_parser,
        reasoning_parser=reasoning_parser,
        json_whitespace=json_whitespace,
        sampling={
            **SAMPLING_DEFAULTS,
            **(_sampling(folder, generation_config) if has_own_sampling else {}),
        },
        eos_ids=_eos_ids(config, generation_config, tokenizer, specials),
        vocabulary_size=_integer(config, "vocab_size", tokenizer.get_vocab_size()),
        max_context_tokens=min(
            context, max_context_tokens or context, pooling.max_tokens or context
        ),
        pooling=pooling,
        pooling_problem=problem,
        images=images,
        images_problem=images_problem,
        audio=audio,
        audio_problem=audio_problem,
        videos=videos,
        videos_problem=videos_problem,
        speech=speech,
        model_type=str(config.get("model_type", "")),
        hidden_size=_integer(config, "hidden_size", 1) if config.get("hidden_size") else 0,
        num_parameters=num_parameters(folder),
        unweighted_ids=_ids_of(tokenizer, specials, _UNWEIGHTED),
        labels=_labels(config),
        created=int(time.time()),
    )


def with_own_tokenizer(model: ModelCard, folder: Path) -> ModelCard:
    """The model card for an adapter with its own tokenizer, which `folder` holds with the files
    that belong to it.

    The chat template is the adapter's if it brings one. Its end-of-text token counts in addition to
    the model's.

    Raises:
        ModelError: A file cannot be understood, or tokens of the model have other ids.
    """
    parts, specials = _read_tokenizer(folder, model.tool_parser, model.reasoning_parser)
    own = parts["tokenizer"].get_vocab()
    for token, id_ in model.tokenizer.get_vocab().items():
        if own.get(token) != id_:
            raise ModelError(
                f"{folder / TOKENIZER_FILE}: {token[:_SHOWN_CHARS]!r} is token {own.get(token)}, "
                f"of the model {id_}; an adapter's tokenizer may only add tokens"
            )
    if parts["template"] is None:
        kept = ("template", "tool_template", "tool_format", "reasoning")
        parts |= {name: getattr(model, name) for name in kept}
    return replace(
        model,
        **parts,
        controls=_controls(parts, model.media.values()),
        eos_ids=model.eos_ids | _eos_ids({}, {}, parts["tokenizer"], specials),
        vocabulary_size=max(model.vocabulary_size, 1 + max(own.values())),
    )


def _sampling(folder: Path, generation_config: dict[str, Any]) -> dict[str, float]:
    given: dict[str, float] = {}
    for name, one in PARAMETERS.items():
        if not one.of_model:
            continue
        value = generation_config.get(name)
        if value is None:
            continue
        kinds = int if one.type == "int" else (int, float)
        is_number = isinstance(value, kinds) and not isinstance(value, bool)
        is_low = is_number and one.excludes_low and value == one.low
        if not is_number or is_low or not one.low <= value <= one.high:
            raise ModelError(
                f"{folder / 'generation_config.json'}: {name} is {value!r:.40}; it must be a "
                f"number from {one.low} to {one.high}. Mend it, or give --generation-config none"
            )
        given[name] = value
    return given


def _read_tokenizer(
    folder: Path, tool_parser: str, reasoning_parser: str, chat_template: str = ""
) -> tuple[dict[str, Any], dict[str, str]]:
    """The fields of `ModelCard` that a tokenizer's files decide, and its special tokens."""
    tokenizer, tokenizer_config, specials = read_tokenizer(folder)
    vocabulary = Vocabulary(tokenizer)
    sources = _template_sources(folder, tokenizer_config)
    source, for_tools = sources.get(_DEFAULT_TEMPLATE), sources.get(_TOOL_TEMPLATE)
    if chat_template:
        source, for_tools = _chosen_template(chat_template, sources), None
    reasoning = REASONING_FORMATS.get(reasoning_parser)
    if reasoning_parser == AUTO:
        reasoning = find_reasoning(source or "")
    fields = {
        "tokenizer": tokenizer,
        "vocabulary": vocabulary,
        "template": None if source is None else ChatTemplate(source, specials),
        "tool_template": None if for_tools is None else ChatTemplate(for_tools, specials),
        "tool_format": FORMATS.get(tool_parser) or find_tool_format(for_tools or source or ""),
        "reasoning": reasoning,
        "max_token_bytes": _max_token_bytes(tokenizer, vocabulary),
    }
    return fields, specials


def _controls(parts: Mapping[str, Any], media: Iterable[MediaPrompts]) -> ControlTokens:
    templates = (parts["template"], parts["tool_template"])
    sources = [one.source for one in templates if one is not None]
    sources += [token for one in media for token in one.tokens]
    return ControlTokens(parts["tokenizer"], sources)


def _pooling(folder: Path) -> tuple[PoolingConfig, str]:
    """How a model makes vectors, or why its files do not say. Workers that generate need no such
    files, and others do not start with damaged ones.
    """
    try:
        return load_pooling(folder), ""
    except ModelError as error:
        _log.warning("%s serves text alone: %s", folder, error.message)
        return load_pooling(folder, "generate"), error.message


def _images(
    folder: Path, config: dict[str, Any], tokenizer: Tokenizer
) -> tuple[ImagePrompts | None, str]:
    """How a model takes images, or why its images are not served."""
    try:
        return load_image_prompts(folder, config, tokenizer), ""
    except ModelError as error:
        _log.warning("%s serves no images: %s", folder, error.message)
        return None, error.message


def _videos(
    folder: Path, config: Mapping[str, Any], tokenizer: Tokenizer
) -> tuple[VideoPrompts | None, str]:
    try:
        prompts = load_video_prompts(folder, config, tokenizer)
    except ModelError as error:
        _log.warning("%s serves no videos: %s", folder, error.message)
        return None, error.message
    if prompts is not None and not is_installed():
        return None, f"this gateway reads no videos; install the wheel with its extra `{EXTRA}`"
    return prompts, ""


def _audio(
    folder: Path, config: dict[str, Any], tokenizer: Tokenizer
) -> tuple[ClipPrompts | None, str]:
    """How a model hears, or why it is not served."""
    try:
        return load_clip_prompts(folder, config, tokenizer), ""
    except ModelError as error:
        _log.warning("%s serves no audio: %s", folder, error.message)
        return None, error.message


def _integer(config: dict[str, Any], name: str, default: int) -> int:
    value = config.get(name, default)
    if not isinstance(value, int) or value < 1:
        raise ModelError(f"config.json: {name} is {value!r}; a positive integer is expected")
    return value


def _labels(config: dict[str, Any]) -> tuple[str, ...]:
    named = config.get("id2label")
    if not isinstance(named, dict):
        return ()
    try:
        return tuple(str(named[key]) for key in sorted(named, key=int))
    except ValueError as error:
        raise ModelError(f"config.json: id2label: {error}") from error


def _text_config(config: dict[str, Any]) -> dict[str, Any]:
    inner = config.get("text_config")
    return {**config, **inner} if isinstance(inner, dict) else config


def _template_sources(folder: Path, tokenizer_config: dict[str, Any]) -> dict[str, str]:
    path, more = folder / "chat_template.jinja", folder / "additional_chat_templates"
    found: dict[str, Any] = {}
    if path.is_file():
        found = {one.stem: _read_template(one) for one in sorted(more.glob("*.jinja"))}
        return {**found, _DEFAULT_TEMPLATE: _read_template(path)}
    source, where = tokenizer_config.get("chat_template"), "tokenizer_config.json"
    if source is None:
        where = "chat_template.json"
        source = read_json(folder / where).get("chat_template")
    if isinstance(source, list) and all(isinstance(item, dict) for item in source):
        found = {str(item.get("name")): item.get("template") for item in source}
        if _DEFAULT_TEMPLATE not in found:
            _log.warning("no chat template is called `default`, only %s", ", ".join(found))
    elif source is not None:
        found = {_DEFAULT_TEMPLATE: source}
    if not all(isinstance(text, str) for text in found.values()):
        raise ModelError(
            f"{folder / where}: chat_template: expected a text, or a list of such with names, got "
            f"{str(source)[:200]}"
        )
    return found


def _chosen_template(chosen: str, sources: Mapping[str, str]) -> str:
    if chosen in sources:
        return sources[chosen]
    path = Path(chosen)
    try:
        path = path.expanduser()
        is_file = path.is_file()
    except (OSError, ValueError, RuntimeError):  # too long a name; a user whom nobody knows
        is_file = False
    if not is_file:
        raise ModelError(
            f"chat_template: {chosen[:_SHOWN_CHARS]!r} is no file, and none of the model's "
            f"templates ({', '.join(sorted(sources)) or 'it has none'}); give a file's path or one "
            "of these names, not the template itself",
            param="chat_template",
        )
    return _read_template(path)


def _read_template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: cannot be read: {error}") from error


def _eos_ids(
    config: dict[str, Any],
    generation_config: dict[str, Any],
    tokenizer: Tokenizer,
    specials: dict[str, str],
) -> frozenset[int]:
    """The end-of-text ids of the model's files; else the tokenizer's."""
    ids = end_token_ids(config, generation_config)
    if ids:
        return frozenset(ids)
    eos = tokenizer.token_to_id(specials["eos_token"]) if "eos_token" in specials else None
    return frozenset() if eos is None else frozenset({eos})


def _ids_of(tokenizer: Tokenizer, specials: dict[str, str], names: Sequence[str]) -> frozenset[int]:
    """Leaves out names of special tokens that the model does not have."""
    ids = (tokenizer.token_to_id(specials[name]) for name in names if name in specials)
    return frozenset(id_ for id_ in ids if id_ is not None)


def _max_token_bytes(tokenizer: Tokenizer, vocabulary: Vocabulary) -> int:
    """0 if unknown."""
    lossless = vocabulary.is_byte_level and tokenizer.normalizer is None
    trims = any(t.lstrip or t.rstrip for t in tokenizer.get_added_tokens_decoder().values())
    if not lossless or trims:
        return 0
    # A character of the byte-level alphabet stands for one byte, one of an added token for at most
    # four.
    return max(_upper_bound(token) for token in tokenizer.get_vocab())


def _upper_bound(token: str) -> int:
    return max(len(token), len(token.encode("utf-8", "surrogatepass")))


def least_tokens(model: ModelCard, texts: Sequence[str]) -> int:
    """A lower bound of the number of tokens of a text, without tokenising it; 0: none."""
    if not model.max_token_bytes:
        return 0
    return sum(len(text) for text in texts) // model.max_token_bytes
