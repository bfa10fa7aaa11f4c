"""What PEFT makes of the adapters that a mesh serves."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from weft.testing.draws import draw_until
from weft.testing.meshes.tiny_mesh import VOCAB, Greedy


class Peft(Greedy):
    """PEFT's own greedy continuations, of the base model too.

    Args:
        model_dir: Of the base model.
        root: Folder of the adapters.
        names: Theirs.
        num_new: Tokens of an answer.
    """

    def __init__(self, model_dir: Path, root: Path, names: Sequence[str], num_new: int) -> None:
        from peft import PeftModel

        super().__init__(model_dir)
        self._model = PeftModel.from_pretrained(self._model, root / names[0], names[0])
        for name in names[1:]:
            self._model.load_adapter(root / name, name)
        self._model.eval()
        self._num_new = num_new
        self._lock = threading.Lock()

    @contextmanager
    def _with(self, adapter: str) -> Iterator[None]:
        with self._lock:
            if not adapter:
                with self._model.disable_adapter():
                    yield
                    return
            self._model.set_adapter(adapter)
            yield

    def answer(self, adapter: str, prompt: list[int], num_new: int = 0) -> str:
        """The text with an adapter; empty = without one."""
        with self._with(adapter):
            return self.text(self.ids(prompt, num_new or self._num_new))

    def prompt(self, length: int, adapters: Sequence[str]) -> list[int]:
        """Random tokens of which float32 can tell the answers with each of these adapters."""
        return draw_until(
            lambda: [random.randrange(3, VOCAB) for _ in range(length)],
            lambda prompt: all(self._tells(adapter, prompt) for adapter in adapters),
        )

    def _tells(self, adapter: str, prompt: list[int]) -> bool:
        with self._with(adapter):
            return self.is_clear(prompt, self._num_new)

    def check_text(
        self, adapter: str, prompt: list[int], ids: list[int], text: str, num_new: int
    ) -> None:
        """So many ids and their text are those with an adapter, where float32 can tell."""
        with self._with(adapter):
            self.check(prompt, ids, num_new)
        assert text == self.text(ids)
