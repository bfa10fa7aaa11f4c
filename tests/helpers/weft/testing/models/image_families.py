"""Small random models of several families that take images, written by transformers, and what
transformers makes of prompts with images.
"""

from __future__ import annotations

import json
import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from weft.contract.spans import Media, MediaSpan
from weft.testing.models.tiny_vision import write_marked_tokenizer

VOCAB_SIZE = 517
IMAGE_TOKEN_ID, BEGIN_ID, END_ID, BREAK_ID = range(VOCAB_SIZE - 4, VOCAB_SIZE)
_QWEN2 = {
    "model_type": "qwen2",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "max_position_embeddings": 8192,
}
MEAN, STD = (0.4, 0.5, 0.6), (0.3, 0.4, 0.5)


class Prompt(NamedTuple):
    """Tokens, and the media among them."""

    ids: list[int]
    spans: list[MediaSpan]
    media: list[Media]


class ImageFamily(ABC):
    """One family with tiny sizes."""

    name: ClassVar[str]
    """Of its image processor's class, without the end."""
    marks: ClassVar[tuple[str, str, str, str]]
    """What the tokenizer calls IMAGE_TOKEN_ID, BEGIN_ID, END_ID and BREAK_ID."""
    whole: ClassVar[dict[str, Any]] = {}
    """Of processor_config.json."""
    sees_both_ways: ClassVar[bool] = False
    """Whether tokens of one picture attend to one another both ways."""
    has_states: ClassVar[bool] = False
    """Whether prefixes are found where recurrent layers have kept their states alone."""
    embedding_scale: ClassVar[float] = 0.5
    """Small enough that layers, and so images, decide what is drawn."""

    @abstractmethod
    def config(self, **fields: Any) -> Any:
        """Transformers' configuration. `fields` replace its own: `vision` and `text` are fields of
        these sections.
        """

    @abstractmethod
    def picture(self) -> Media:
        """A random picture of any shape that the tower takes."""

    @abstractmethod
    def put(self, ids: list[int], spans: list[MediaSpan], medium: Media) -> None:
        """Adds a picture's tokens and spans to a prompt's."""

    @abstractmethod
    def rows(self, model: Any, pictures: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """[rows, hidden] of each picture, [3, height, width] of normalised numbers."""

    def processor(self, config: Any) -> dict[str, Any]:
        """Fields of preprocessor_config.json."""
        side = config.vision_config.image_size
        return {"size": {"height": side, "width": side}}

    def hidden(
        self, model: Any, embedded: torch.Tensor, is_row: torch.Tensor, prompt: Prompt
    ) -> torch.Tensor:
        """[1, T, hidden]: the language model's result. `is_row`, [1, T], is 1 for rows of media."""
        return model.model.language_model(inputs_embeds=embedded).last_hidden_state  # type: ignore[no-any-return]

    def head(self, model: Any) -> Any:
        return model.lm_head

    def make(self, path: Path, seed: int, **fields: Any) -> Path:
        """Writes a model directory."""
        import transformers

        config = self.config(**fields)
        model = transformers.AutoModelForImageTextToText.from_config(config).float()
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, value in model.named_parameters():
                noise = torch.randn(value.shape, generator=generator)
                if value.ndim == 1 or "cls_token" in name or "lambda" in name:
                    value.copy_(0.3 * noise if self.is_around_zero(name) else 1 + 0.2 * noise)
                elif name.endswith(("embed_tokens.weight", "position_embedding.weight")):
                    value.copy_(self.embedding_scale * noise)
                else:
                    value.copy_(noise / value[0].numel() ** 0.5)
        model.save_pretrained(path)
        write_marked_tokenizer(path, VOCAB_SIZE, self.marks, "", self.marks[2])
        processor = {
            "image_mean": MEAN,
            "image_std": STD,
            "image_processor_type": f"{self.name}ImageProcessor",
            "rescale_factor": 1 / 255,
            **self.processor(config),
        }
        (path / "preprocessor_config.json").write_text(json.dumps(processor))
        (path / "processor_config.json").write_text(json.dumps(self.whole))
        return path

    def is_around_zero(self, name: str) -> bool:
        """Whether a vector of parameters is about 0, and not about 1."""
        return name.endswith(("bias", "cls_token", "position_embeddings"))

    def prompt(self, pictures: Sequence[Media], begin: list[int] | None = None) -> Prompt:
        """Text, the pictures with text between some of them, text."""
        ids, spans = list(begin or text()), list[MediaSpan]()
        for one in pictures:
            self.put(ids, spans, one)
            if random.random() < 0.7:
                ids += text()
        return Prompt([*ids, *text()], spans, list({one.digest: one for one in pictures}.values()))

    @torch.no_grad()
    def logits(self, model: Any, prompt: Prompt, tokens: list[int]) -> torch.Tensor:
        """[tokens, vocab]: before each of the tokens after the prompt. Placeholders among those are
        tokens like others: a model of random weights draws them.
        """
        by_digest = dict(
            zip(
                (one.digest for one in prompt.media),
                self.rows(model, [normalised(one) for one in prompt.media]),
                strict=True,
            )
        )
        ids = torch.tensor([[*prompt.ids, *tokens]])
        embedded = model.get_input_embeddings()(ids).clone()
        is_row = torch.zeros_like(ids)
        for span in prompt.spans:
            rows = by_digest[span.digest][span.offset : span.offset + span.length]
            embedded[0, span.position : span.end] = rows
            is_row[0, span.position : span.end] = 1
        hidden = self.hidden(model, embedded, is_row, prompt)
        logits: torch.Tensor = self.head(model)(hidden)[0, len(prompt.ids) - 1 : -1]
        return logits


class Gemma3(ImageFamily):
    """A window in two of three layers, shorter than an image's tokens."""

    name = "Gemma3"
    marks = ("<image_soft_token>", "<start_of_image>", "<end_of_image>", "<unused>")
    whole: ClassVar[dict[str, Any]] = {"image_seq_length": 16}
    sees_both_ways = True
    embedding_scale = 0.05

    def config(self, **fields: Any) -> Any:
        import transformers

        return transformers.Gemma3Config(
            text_config={
                "vocab_size": VOCAB_SIZE,
                "hidden_size": 64,
                "head_dim": 32,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "intermediate_size": 96,
                "num_hidden_layers": 3,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
                "sliding_window": 10,
                "max_position_embeddings": 8192,
                "query_pre_attn_scalar": 32,
                **fields.pop("text", {}),
            },
            vision_config={
                "model_type": "siglip_vision_model",
                "hidden_size": 48,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "intermediate_size": 80,
                "image_size": 48,
                "patch_size": 6,
                "vision_use_head": False,
                **fields.pop("vision", {}),
            },
            mm_tokens_per_image=16,
            image_token_index=IMAGE_TOKEN_ID,
            boi_token_index=BEGIN_ID,
            eoi_token_index=END_ID,
            **fields,
        )

    def is_around_zero(self, name: str) -> bool:
        """Norms of the language model add 1 to their weights."""
        is_of_tower = "vision_tower" in name
        return name.endswith("bias") or ("norm" in name and not is_of_tower)

    def picture(self) -> Media:
        return random_picture(48, 48)

    def put(self, ids: list[int], spans: list[MediaSpan], medium: Media) -> None:
        ids.append(BEGIN_ID)
        spans.append(
            MediaSpan(position=len(ids), length=16, digest=medium.digest, shape=medium.shape)
        )
        ids += [*[IMAGE_TOKEN_ID] * 16, END_ID]

    def rows(self, model: Any, pictures: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        found = model.model.get_image_features(torch.stack(list(pictures))).pooler_output
        return list(found)

    def hidden(
        self, model: Any, embedded: torch.Tensor, is_row: torch.Tensor, prompt: Prompt
    ) -> torch.Tensor:
        found = model.model(inputs_embeds=embedded, token_type_ids=is_row, use_cache=False)
        return found.last_hidden_state  # type: ignore[no-any-return]


class InternVL(ImageFamily):
    """A class token, scaled layers and norms of q and k."""

    name = "GotOcr2"
    marks = ("<IMG_CONTEXT>", "<img>", "</img>", "<unused>")
    whole: ClassVar[dict[str, Any]] = {
        "image_seq_length": 16,
        "processor_class": "InternVLProcessor",
    }

    def config(self, **fields: Any) -> Any:
        import transformers

        return transformers.InternVLConfig(
            text_config={**_QWEN2, **fields.pop("text", {})},
            vision_config={
                "hidden_size": 48,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "intermediate_size": 80,
                "image_size": [48, 48],
                "patch_size": [6, 6],
                "attention_bias": True,
                "use_qk_norm": True,
                **fields.pop("vision", {}),
            },
            image_token_id=IMAGE_TOKEN_ID,
            image_seq_length=16,
            tie_word_embeddings=False,
            **fields,
        )

    def processor(self, config: Any) -> dict[str, Any]:
        height, width = config.vision_config.image_size
        return {"size": {"height": height, "width": width}, "processor_class": "InternVLProcessor"}

    def picture(self) -> Media:
        return random_picture(48, 48)

    def put(self, ids: list[int], spans: list[MediaSpan], medium: Media) -> None:
        ids.append(BEGIN_ID)
        spans.append(
            MediaSpan(position=len(ids), length=16, digest=medium.digest, shape=medium.shape)
        )
        ids += [*[IMAGE_TOKEN_ID] * 16, END_ID]

    def rows(self, model: Any, pictures: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        found = model.model.get_image_features(torch.stack(list(pictures))).pooler_output
        return list(found)


class Llama4(ImageFamily):
    """Tiles with a class token and rotations; layers of text attend in chunks, or do not rotate."""

    name = "Llama4"
    marks = ("<|patch|>", "<|image_start|>", "<|image_end|>", "<|image|>")
    whole: ClassVar[dict[str, Any]] = {"processor_class": "Llama4Processor"}
    embedding_scale = 0.05

    def config(self, **fields: Any) -> Any:
        import transformers

        return transformers.Llama4Config(
            text_config={
                "vocab_size": VOCAB_SIZE,
                "hidden_size": 64,
                "head_dim": 16,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "intermediate_size": 48,
                "intermediate_size_mlp": 96,
                "num_hidden_layers": 4,
                "num_local_experts": 4,
                "num_experts_per_tok": 1,
                "interleave_moe_layer_step": 2,
                "attention_chunk_size": 64,
                "max_position_embeddings": 8192,
                "attn_implementation": "eager",
                "pad_token_id": 0,
                "bos_token_id": 1,
                "eos_token_id": 2,
                **fields.pop("text", {}),
            },
            vision_config={
                "hidden_size": 48,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "intermediate_size": 192,
                "image_size": 48,
                "patch_size": 6,
                "projector_input_dim": 40,
                "projector_output_dim": 40,
                "vision_output_dim": 40,
                **fields.pop("vision", {}),
            },
            image_token_index=IMAGE_TOKEN_ID,
            boi_token_index=BEGIN_ID,
            eoi_token_index=END_ID,
            **fields,
        )

    def is_around_zero(self, name: str) -> bool:
        return name.endswith(("bias", "class_embedding"))

    def processor(self, config: Any) -> dict[str, Any]:
        return {**super().processor(config), "max_patches": 1}

    def picture(self) -> Media:
        return random_picture(48, 48)

    def put(self, ids: list[int], spans: list[MediaSpan], medium: Media) -> None:
        ids += [BEGIN_ID, BREAK_ID]
        spans.append(
            MediaSpan(position=len(ids), length=16, digest=medium.digest, shape=medium.shape)
        )
        ids += [*[IMAGE_TOKEN_ID] * 16, END_ID]

    def rows(self, model: Any, pictures: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        features = model.vision_model(torch.stack(list(pictures))).last_hidden_state
        return list(model.multi_modal_projector(features))

    def hidden(
        self, model: Any, embedded: torch.Tensor, is_row: torch.Tensor, prompt: Prompt
    ) -> torch.Tensor:
        return model.language_model.model(inputs_embeds=embedded).last_hidden_state  # type: ignore[no-any-return]

    def head(self, model: Any) -> Any:
        return model.language_model.lm_head


class Mistral3(ImageFamily):
    """Pictures of any shape; their rows of tokens have other tokens between them."""

    name = "Pixtral"
    marks = ("[IMG]", "[IMG_BEGIN]", "[IMG_END]", "[IMG_BREAK]")
    whole: ClassVar[dict[str, Any]] = {"patch_size": 6, "spatial_merge_size": 2}
    square = 12

    def config(self, **fields: Any) -> Any:
        import transformers

        return transformers.Mistral3Config(
            text_config={
                **_QWEN2,
                "model_type": "mistral",
                "head_dim": 16,
                "sliding_window": None,
                **fields.pop("text", {}),
            },
            vision_config={
                "hidden_size": 48,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "intermediate_size": 80,
                "image_size": 60,
                "patch_size": 6,
                **fields.pop("vision", {}),
            },
            image_token_index=IMAGE_TOKEN_ID,
            tie_word_embeddings=False,
            **fields,
        )

    def processor(self, config: Any) -> dict[str, Any]:
        return {"size": {"longest_edge": config.vision_config.image_size}, "patch_size": 6}

    def picture(self) -> Media:
        # Transformers fails with a single row alone.
        rows, columns = random.randint(1, 5), random.randint(2, 5)
        return random_picture(rows * self.square, columns * self.square)

    def put(self, ids: list[int], spans: list[MediaSpan], medium: Media) -> None:
        rows, columns = (side // self.square for side in medium.shape[:2])
        for row in range(rows):
            spans.append(
                MediaSpan(
                    position=len(ids),
                    length=columns,
                    digest=medium.digest,
                    offset=row * columns,
                    shape=medium.shape,
                )
            )
            ids += [*[IMAGE_TOKEN_ID] * columns, BREAK_ID]
        ids[-1] = END_ID

    def rows(self, model: Any, pictures: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        sizes = [tuple(one.shape[1:]) for one in pictures]
        height, width = (max(side) for side in zip(*sizes, strict=True))
        padded = torch.zeros(len(pictures), 3, height, width)
        for one, into in zip(pictures, padded, strict=True):
            into[:, : one.shape[1], : one.shape[2]] = one
        found = model.model.get_image_features(padded, torch.tensor(sizes)).pooler_output
        return list(found)


class Pixtral(Mistral3):
    """Each patch is a token."""

    whole: ClassVar[dict[str, Any]] = {"patch_size": 6, "spatial_merge_size": 1}
    square = 6

    def config(self, **fields: Any) -> Any:
        import transformers

        of_mistral3 = super().config(**fields)
        return transformers.LlavaConfig(
            text_config=of_mistral3.text_config.to_dict(),
            vision_config=of_mistral3.vision_config.to_dict(),
            image_token_index=IMAGE_TOKEN_ID,
            vision_feature_layer=-1,
            vision_feature_select_strategy="full",
            tie_word_embeddings=False,
        )

    def rows(self, model: Any, pictures: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        # Each alone: transformers divides the rows of several by patches of its own.
        return [self._alone(model, one) for one in pictures]

    def _alone(self, model: Any, picture: torch.Tensor) -> torch.Tensor:
        sizes = torch.tensor([picture.shape[1:]])
        found = model.model.get_image_features(picture[None], image_sizes=sizes).pooler_output
        return torch.cat(list(found))


class PaddleOCR(ImageFamily):
    """Pictures of any shape, whose tokens have positions by row and column."""

    name = "PaddleOCRVL"
    marks = ("<|IMAGE_PLACEHOLDER|>", "<|IMAGE_START|>", "<|IMAGE_END|>", "<unused>")
    embedding_scale = 0.05
    square = 12

    def config(self, **fields: Any) -> Any:
        import transformers

        rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
        text = {**_QWEN2, "head_dim": 16, "rope_parameters": rope, **fields.pop("text", {})}
        del text["model_type"]
        return transformers.PaddleOCRVLConfig(
            text_config=text,
            vision_config={
                "hidden_size": 48,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "intermediate_size": 80,
                "image_size": 30,
                "patch_size": 6,
                **fields.pop("vision", {}),
            },
            image_token_id=IMAGE_TOKEN_ID,
            **fields,
        )

    def processor(self, config: Any) -> dict[str, Any]:
        size = {"shortest_edge": 576, "longest_edge": 57_600}
        return {"patch_size": 6, "merge_size": 2, "temporal_patch_size": 1, "size": size}

    def picture(self) -> Media:
        rows, columns = random.randint(1, 5), random.randint(1, 5)
        return random_picture(rows * self.square, columns * self.square)

    def put(self, ids: list[int], spans: list[MediaSpan], medium: Media) -> None:
        height, width, _ = medium.shape
        length = height * width // self.square**2
        ids.append(BEGIN_ID)
        spans.append(
            MediaSpan(position=len(ids), length=length, digest=medium.digest, shape=medium.shape)
        )
        ids += [*[IMAGE_TOKEN_ID] * length, END_ID]

    def rows(self, model: Any, pictures: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        grids = [(1, one.shape[1] // 6, one.shape[2] // 6) for one in pictures]
        patches = [
            one.view(3, rows, 6, columns, 6).permute(1, 3, 0, 2, 4).reshape(-1, 3, 6, 6)
            for one, (_, rows, columns) in zip(pictures, grids, strict=True)
        ]
        found = model.model.get_image_features(torch.cat(patches), torch.tensor(grids))
        return list(found.pooler_output)

    def hidden(
        self, model: Any, embedded: torch.Tensor, is_row: torch.Tensor, prompt: Prompt
    ) -> torch.Tensor:
        shapes = {one.digest: one.shape for one in prompt.media}
        sides = [shapes[span.digest] for span in prompt.spans]
        grids = torch.tensor([(1, height // 6, width // 6) for height, width, _ in sides])
        positions, _ = model.model.get_rope_index(is_row, is_row, grids)
        found = model.model.language_model(inputs_embeds=embedded, position_ids=positions)
        return found.last_hidden_state  # type: ignore[no-any-return]


FAMILIES: dict[str, type[ImageFamily]] = {
    "gemma3": Gemma3,
    "internvl": InternVL,
    "llama4": Llama4,
    "mistral3": Mistral3,
    "paddleocr_vl": PaddleOCR,
    "pixtral": Pixtral,
}


def text(most: int = 24) -> list[int]:
    """Random tokens of text."""
    return [random.randrange(3, 256) for _ in range(random.randint(1, most))]


def random_picture(height: int, width: int) -> Media:
    """A picture of noise."""
    return Media.of("image", "test", (height, width, 3), random.randbytes(height * width * 3))


def pixels_of(medium: Media) -> torch.Tensor:
    """[height, width, 3] uint8."""
    return torch.frombuffer(bytearray(medium.data), dtype=torch.uint8).view(medium.shape)


def normalised(medium: Media) -> torch.Tensor:
    """[3, height, width]: what transformers' processor makes of a picture."""
    numbers = (pixels_of(medium) / 255 - torch.tensor(MEAN)) / torch.tensor(STD)
    return numbers.permute(2, 0, 1)
