"""Gives the prompts of a request for vectors the form that its model was trained with."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from weft.contract.tasks import HEADED_OUTPUTS, PoolingParams, Task
from weft.gateway.request import (
    PairPrompt,
    PoolingOptions,
    Prompt,
    TextPrompt,
    WrappedPrompt,
)
from weft.gateway.text.model_card import ModelCard
from weft.gateway.validate import invalid

DEFAULT_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"


class _Judge(NamedTuple):
    """The form of a question to a model that scores by the logits of tokens."""

    head: str
    query: str
    """Comes before the document, with the query and the instruction."""
    tail: str
    yes: str
    """The token that says that a document is relevant."""
    no: str
    """The token that says that it is not; empty: only the model's files may name one."""

    @property
    def takes_instruction(self) -> bool:
        """Whether requests may have one."""
        return "{instruction}" in self.query


_QWEN3 = _Judge(
    head="<|im_start|>system\nJudge whether the Document meets the requirements based on the Query "
    'and the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n",
    query="<Instruct>: {instruction}\n<Query>: {query}\n<Document>: ",
    tail="<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
    yes="yes",
    no="no",
)
"""Qwen3-Reranker's, from its model card."""
_GEMMA = _Judge(
    head="<bos>",
    query="A: {query}\nB: ",
    tail="\nGiven a query A and a passage B, determine whether the passage contains an answer to "
    "the query by providing a prediction of either 'Yes' or 'No'.",
    yes="Yes",
    no="",
)
"""bge-reranker-v2-gemma's, from its model card."""
_JUDGES = {"gemma": _GEMMA}
"""Forms of questions by `model_type`; other models are asked as Qwen3-Reranker."""
_NEEDS: dict[Task, str] = {
    "generate": "text, chat or completions",
    "embed": "embeddings",
    "classify": "classes and scores",
    "score": "scores and ranks",
}


def for_model(
    prompts: tuple[Prompt, ...], pooling: PoolingOptions | None, card: ModelCard, task: Task
) -> tuple[tuple[Prompt, ...], PoolingOptions | None]:
    """Makes the prompts of a request those that the model was trained with.

    Args:
        pooling: The requested vectors; None: the request is for tokens.
        task: The task that the model's workers serve.

    Raises:
        InvalidRequest: The model serves another task, or has no such prompt.
    """
    if pooling is None:
        if task != "generate":
            raise _other_task(card, task, "text")
        return prompts, None
    if card.pooling_problem:
        message = f"the pooling files of `{card.name}` cannot be used: {card.pooling_problem}"
        raise invalid("model", message)
    if any(isinstance(prompt, PairPrompt) for prompt in prompts):
        return _scored(prompts, pooling, card, task)
    wanted = PoolingParams(output=pooling.output).task
    if wanted != task:
        raise _other_task(card, task, _NEEDS[wanted])
    if pooling.output in HEADED_OUTPUTS:
        if pooling.output not in card.pooling.token_heads:
            raise invalid("model", f"the model `{card.name}` has no head for {pooling.output}")
        if pooling.dimensions is not None:
            raise invalid("dimensions", f"{pooling.output} has one width")
    ahead = _prompt_ahead(pooling, card)
    if not ahead:
        return prompts, pooling
    return tuple(_behind(ahead, prompt) for prompt in prompts), pooling


def _scored(
    prompts: tuple[Prompt, ...], wanted: PoolingOptions, card: ModelCard, task: Task
) -> tuple[tuple[Prompt, ...], PoolingOptions]:
    if task == "classify":
        if len(card.labels) != 1:
            raise invalid(
                "model",
                f"the model `{card.name}` has {len(card.labels)} classes; scores need one, see "
                "/v1/classify",
            )
        if wanted.instruction:
            raise invalid("instruction", f"the model `{card.name}` takes none")
        return prompts, replace(wanted, output="classes")
    if task != "score":
        raise _other_task(card, task, _NEEDS["score"])
    judge = _JUDGES.get(card.model_type, _QWEN3)
    if wanted.instruction and not judge.takes_instruction:
        raise invalid("instruction", f"the model `{card.name}` takes none")
    pooling = card.pooling
    labels = [_label(card, pooling.true_token_id, judge.yes)]
    if judge.no or pooling.false_token_id is not None:
        labels.append(_label(card, pooling.false_token_id, judge.no))
    instruction = wanted.instruction or DEFAULT_INSTRUCTION
    judged = tuple(
        _judged(judge, prompt, instruction) if isinstance(prompt, PairPrompt) else prompt
        for prompt in prompts
    )
    return judged, replace(wanted, output="label_logits", label_ids=tuple(labels))


def _judged(judge: _Judge, prompt: PairPrompt, instruction: str) -> WrappedPrompt:
    query = judge.query.format(instruction=instruction, query=prompt.first)
    text = query + prompt.second
    return WrappedPrompt(head=judge.head, text=text, tail=judge.tail, needed_chars=len(query))


def _label(card: ModelCard, given: int | None, word: str) -> int:
    found = card.tokenizer.token_to_id(word) if given is None else given
    if found is None:
        raise invalid("model", f"the model `{card.name}` has no token `{word}` to score with")
    return int(found)


def _prompt_ahead(wanted: PoolingOptions, card: ModelCard) -> str:
    pooling = card.pooling
    if wanted.prompt_name is None:
        choices = (name for name in wanted.prompt_choices if name in pooling.prompts)
        chosen = next(choices, None)
        return pooling.default_prompt if chosen is None else pooling.prompts[chosen]
    if wanted.prompt_name not in pooling.prompts:
        known = ", ".join(f"`{name}`" for name in pooling.prompts)
        told = f"only the prompts {known}" if known else "no prompts of its own"
        raise invalid(wanted.prompt_field, f"the model `{card.name}` has {told}")
    return pooling.prompts[wanted.prompt_name]


def _behind(ahead: str, prompt: Prompt) -> Prompt:
    if isinstance(prompt, TextPrompt):
        return replace(prompt, text=ahead + prompt.text)
    return prompt


def _other_task(card: ModelCard, task: Task, what: str) -> Exception:
    return invalid(
        "model",
        f"the model `{card.name}` serves {_NEEDS[task]}, not {what}; that takes a model of another "
        "kind",
    )
