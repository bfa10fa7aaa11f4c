"""Small random EAGLE heads in the published layouts, and a plain reading of them in float64."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from weft.checkpoint.config import ModelConfig
from weft.engine.model.decoder_only import DecoderOnlyLM
from weft.engine.model.heads.draft_adapter import MODULES
from weft.engine.model.heads.draft_head import load_draft_head
from weft.engine.model.heads.drafted import DraftedModel
from weft.testing.models.choices import NEAR_TIE
from weft.testing.models.paging import PagedDriver, PagedRequest
from weft.testing.models.tiny_adapters import write_adapter

Tensors = dict[str, torch.Tensor]
DRAFT_RANK = 4


def make_tiny_draft(
    path: Path,
    target: Path,
    seed: int = 0,
    *,
    shares: bool = True,
    lm_head: bool = False,
    prefix: str = "",
    layer: str = "midlayer",
    speculators: bool = False,
    **overrides: Any,
) -> Path:
    """Writes a head for a target's directory.

    Args:
        path: Directory to create.
        target: A model's directory.
        seed: Of the weights.
        shares: Embedding and LM head are the target's; else the file has its own.
        lm_head: The file has an LM head, unlike the target's, even if it shares the embedding.
        prefix: Before the names, such as `model.`.
        layer: What the one layer is called.
        speculators: config.json is as the library speculators writes it.
        **overrides: Fields of config.json.

    Returns:
        `path`.
    """
    of_target = ModelConfig.load(target)
    names = ("hidden_size", "num_key_value_heads", "head_dim", "vocab_size")
    sizes = (of_target.hidden_size, of_target.num_kv_heads, of_target.head_dim)
    values = zip(names, (*sizes, of_target.vocab_size), strict=True)
    config = tiny_draft_config(dict(values), **overrides)
    path.mkdir(parents=True, exist_ok=True)
    written = as_speculators(config) if speculators else config
    (path / "config.json").write_text(json.dumps(written, indent=1))
    tensors = tiny_draft_tensors(config, seed, shares=shares, lm_head=lm_head or not shares)
    renamed = {}
    for name, tensor in tensors.items():
        inner = f"{layer}.{name.removeprefix('midlayer.')}" if name.startswith("midlayer") else name
        is_top = name in ("d2t", "t2d", "lm_head.weight")
        renamed[inner if is_top else prefix + inner] = tensor
    save_file(renamed, path / "model.safetensors")
    return path


def as_speculators(config: dict[str, Any]) -> dict[str, Any]:
    """A head's config.json in the layout of the library speculators."""
    own = {"architectures", "draft_vocab_size", "norm_before_residual", "target_hidden_size"}
    own |= {"eagle_aux_hidden_state_layer_ids", "torch_dtype"}
    proposal = {"proposal_type": "greedy", "speculative_tokens": 3}
    return {
        **{name: value for name, value in config.items() if name in own},
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.3.0",
        "transformer_layer_config": {k: v for k, v in config.items() if k not in own},
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"architectures": ["LlamaForCausalLM"], "name_or_path": "target"},
        },
    }


def make_draft_adapter(
    folder: Path, draft_dir: Path, seed: int, *, rank: int = DRAFT_RANK, **settings: Any
) -> Path:
    """A random draft adapter for a head, of alpha 16."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for module in MODULES:
        out, width = load_file(draft_dir / "model.safetensors")[f"midlayer.{module}.weight"].shape
        name = f"base_model.model.midlayer.{module}.lora"
        tensors[f"{name}_A.weight"] = 0.3 * torch.randn(rank, width, generator=generator)
        tensors[f"{name}_B.weight"] = 0.3 * torch.randn(out, rank, generator=generator)
    modules = [module.rpartition(".")[2] for module in MODULES]
    return write_adapter(folder, tensors, r=rank, target_modules=modules, **settings)


def merged_head(path: Path, draft_dir: Path, adapter: Path) -> Path:
    """The head with a draft adapter's products in its weights; alpha / r is 16 / DRAFT_RANK."""
    shutil.copytree(draft_dir, path)
    tensors, halves = (
        load_file(f) for f in (path / "model.safetensors", adapter / "adapter_model.safetensors")
    )
    for module in MODULES:
        a, b = (halves[f"base_model.model.midlayer.{module}.lora_{half}.weight"] for half in "AB")
        tensors[f"midlayer.{module}.weight"] += 16 / DRAFT_RANK * (b @ a)
    save_file(tensors, path / "model.safetensors")
    return path


def tiny_draft_config(target: dict[str, Any], **overrides: Any) -> dict[str, Any]:
    """A head's config.json for a target's."""
    hidden = target["hidden_size"]
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": hidden,
        # Other query heads than the target's; K and V must be as there.
        "num_attention_heads": 2 * target["num_key_value_heads"],
        "num_key_value_heads": target["num_key_value_heads"],
        "head_dim": target.get("head_dim") or hidden // target["num_attention_heads"],
        "intermediate_size": 104,
        "vocab_size": target["vocab_size"],
        "draft_vocab_size": 150,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5000.0,
        "max_position_embeddings": 64,
        "num_hidden_layers": 1,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
    }
    return {**config, **overrides}


def tiny_draft_tensors(
    config: dict[str, Any], seed: int, *, shares: bool, lm_head: bool
) -> Tensors:
    """Random float32 parameters and the map of the vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    target_hidden = config.get("target_hidden_size") or hidden
    size, vocab_size = config["draft_vocab_size"], config["vocab_size"]

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    def linear(rows: int, columns: int) -> torch.Tensor:
        return normal(rows, columns) / columns**0.5

    tensors = {
        "fc.weight": linear(hidden, 3 * target_hidden),
        "midlayer.self_attn.q_proj.weight": linear(heads * dim, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": linear(kv_heads * dim, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": linear(kv_heads * dim, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": linear(hidden, heads * dim),
        "midlayer.mlp.gate_proj.weight": linear(inner, hidden),
        "midlayer.mlp.up_proj.weight": linear(inner, hidden),
        "midlayer.mlp.down_proj.weight": linear(hidden, inner),
    }
    norms = ("hidden_norm", "input_layernorm", "post_attention_layernorm")
    for name in (*(f"midlayer.{norm}" for norm in norms), "norm"):
        tensors[f"{name}.weight"] = 1.0 + 0.2 * normal(hidden)
    # In no order: the published ones ascend, and nothing depends on it.
    ids = torch.randperm(vocab_size, generator=generator)[:size]
    tensors["d2t"] = ids - torch.arange(size)
    tensors["t2d"] = torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
    if lm_head:
        tensors["lm_head.weight"] = linear(size, hidden)
    if not shares:
        tensors["embed_tokens.weight"] = normal(vocab_size, hidden)
    return tensors


def make_tiny_eagle(
    path: Path,
    target: Path,
    seed: int = 0,
    *,
    shares: bool = True,
    fc_bias: bool = True,
    qkv_bias: bool = False,
    **overrides: Any,
) -> Path:
    """Writes an EAGLE-1 head for a target's directory.

    Args:
        path: Directory to create.
        target: A model's directory.
        seed: Of the weights.
        shares: The LM head is the target's; else the file has its own. Published ones bring the
            target's embedding, these one of their own.
        fc_bias: Of `fc`.
        qkv_bias: Of q, k and v.
        **overrides: Fields of config.json.

    Returns:
        `path`.
    """
    own = {"architectures": ["LlamaForCausalLM"], "draft_vocab_size": None, **overrides}
    config = tiny_draft_config(json.loads((target / "config.json").read_text()), **own)
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config, indent=1))
    generator = torch.Generator().manual_seed(seed)
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]

    def linear(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) / columns**0.5

    sizes = {"q": heads * dim, "k": kv_heads * dim, "v": kv_heads * dim}
    tensors = {
        "fc.weight": linear(hidden, 2 * hidden),
        **{f"layers.0.self_attn.{n}_proj.weight": linear(m, hidden) for n, m in sizes.items()},
        "layers.0.self_attn.o_proj.weight": linear(hidden, heads * dim),
        "layers.0.mlp.gate_proj.weight": linear(inner, hidden),
        "layers.0.mlp.up_proj.weight": linear(inner, hidden),
        "layers.0.mlp.down_proj.weight": linear(hidden, inner),
        "layers.0.post_attention_layernorm.weight": 1 + 0.2 * linear(1, hidden)[0],
    }
    if fc_bias:
        tensors["fc.bias"] = linear(1, hidden)[0]
    if qkv_bias:
        biases = {f"layers.0.self_attn.{n}_proj.bias": linear(1, m)[0] for n, m in sizes.items()}
        tensors |= biases
    if not shares:
        tensors["lm_head.weight"] = linear(config["vocab_size"], hidden)
        tensors["embed_tokens.weight"] = linear(hidden, config["vocab_size"]).T.contiguous()
    save_file(tensors, path / "model.safetensors")
    return path


class _Drafts(list[int]):
    """Drafts of a `NaiveHead` behind a text."""

    def __init__(self, head: NaiveHead, states: torch.Tensor, tokens: list[int]) -> None:
        super().__init__()
        self._head, self._states, self._tokens = head, states, tokens

    def __eq__(self, found: object) -> bool:
        if list.__eq__(self, found) is True:
            return True
        if not isinstance(found, list) or len(found) != len(self):
            return False
        return self._head.lack(self._states, self._tokens, found) <= NEAR_TIE

    def __ne__(self, found: object) -> bool:
        return not self == found


class NaiveHead:
    """A head computed in float64 from its definition, everything anew for each token.

    Args:
        path: In the names that `make_tiny_draft` writes by default.
        embedding: [vocab, hidden] of the target.
        lm_head: [vocab, hidden] of the target.
    """

    _layer = "midlayer"

    def __init__(self, path: Path, embedding: torch.Tensor, lm_head: torch.Tensor) -> None:
        self.config = json.loads((path / "config.json").read_text())
        tensors = load_file(path / "model.safetensors")
        self.ids = torch.arange(len(lm_head))
        if "d2t" in tensors:
            self.ids = torch.arange(len(tensors["d2t"])) + tensors["d2t"]
        self._w = {name: tensor.double() for name, tensor in tensors.items()}
        self._embedding = self._w.get("embed_tokens.weight", embedding.double())
        self._lm_head = self._w.get("lm_head.weight", lm_head.double()[self.ids])

    def fuse(self, aux: torch.Tensor) -> torch.Tensor:
        """[n, 3 * target_hidden] -> [n, hidden]."""
        return aux.double() @ self._w["fc.weight"].T

    def entries(
        self, states: torch.Tensor, tokens: list[int], begin: int = 1
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V [n, kv_heads, dim] of positions `begin` on, from the states before them."""
        joined = self._join(states, tokens)
        k, v = (self._project(joined, name) for name in ("k_proj", "v_proj"))
        return self._rotate(k, begin), v

    def chain(self, states: torch.Tensor, tokens: list[int], depth: int) -> list[int]:
        """The most likely `depth` tokens after `tokens`, of which all but the last have states.

        Other tokens are equal to them if float32 might draft those.
        """
        given = states, list(tokens)
        states, tokens = states.double(), list(tokens)
        assert len(states) == len(tokens) - 1
        found = _Drafts(self, *given)
        for _ in range(depth):
            state = self._last_state(states, tokens[1:])
            logits = self._logits(state)
            found.append(int(self.ids[int(logits.argmax())]))
            # The head's own state stands for the target's that is not known yet.
            states, tokens = torch.cat((states, state[None])), [*tokens, found[-1]]
        return found

    def lack(self, states: torch.Tensor, tokens: list[int], chain: list[int]) -> float:
        """How much less likely than the most likely ones the tokens of a chain are at most: a
        difference of logits, relative to the largest.
        """
        states, tokens, lacks = states.double(), list(tokens), [0.0]
        places = {int(token): place for place, token in enumerate(self.ids)}
        for token in chain:
            state = self._last_state(states, tokens[1:])
            logits = self._logits(state)
            lacks.append(float((logits.max() - logits[places[token]]) / logits.abs().max()))
            states, tokens = torch.cat((states, state[None])), [*tokens, token]
        return max(lacks)

    def tree(
        self, states: torch.Tensor, tokens: list[int], width: int, depth: int
    ) -> tuple[dict[tuple[int, ...], float], float]:
        """Paths that are grown behind `tokens`, of which all but the last have states, and the
        logarithms of their probabilities; and by how much at least the last ones that were grown,
        or had children, were more likely than the next."""
        level: dict[tuple[int, ...], float] = {(): 0.0}
        texts = {(): states.double()}
        found: dict[tuple[int, ...], float] = {}
        least = float("inf")
        for _ in range(depth):
            best = sorted(level, key=level.__getitem__, reverse=True)
            for last, left in zip(best[width - 1 : width], best[width:], strict=False):
                least = min(least, level[last] - level[left])
            children: dict[tuple[int, ...], float] = {}
            for path in best[:width]:
                state = self._last_state(texts[path], [*tokens[1:], *path])
                values, indices = self._logits(state).log_softmax(-1).topk(width + 1)
                least = min(least, float(values[-2] - values[-1]))
                for value, index in zip(values[:-1], indices[:-1], strict=True):
                    child = (*path, int(self.ids[int(index)]))
                    children[child] = level[path] + float(value)
                    texts[child] = torch.cat((texts[path], state[None]))
            found |= children
            level = children
        return found, least

    def taught(self, states: torch.Tensor, tokens: list[int]) -> list[torch.Tensor]:
        """Logits [draft_vocab] of a chain that goes on with given tokens, whatever it would draft.

        Args:
            states: [n, hidden] of the positions before the chain.
            tokens: The text up to the chain's last token; that at position n is its first.
        """
        found: list[torch.Tensor] = []
        for end in range(len(states) + 1, len(tokens) + 1):
            state = self._last_state(states, tokens[1:end])
            found.append(self._logits(state))
            states = torch.cat((states, state[None]))
        return found

    def _last_state(self, states: torch.Tensor, tokens: list[int]) -> torch.Tensor:
        heads, dim = self.config["num_attention_heads"], self.config["head_dim"]
        k, v = (
            entry.repeat_interleave(heads // entry.shape[1], dim=1)
            for entry in self.entries(states, tokens)
        )
        q = self._project(self._join(states, tokens)[-1:], "q_proj")
        q = self._rotate(q, len(tokens))[0]
        weights = (torch.einsum("hd,nhd->hn", q, k) / dim**0.5).softmax(-1)
        mixed = torch.einsum("hn,nhd->hd", weights, v).flatten()
        x = (
            self._residual(states, tokens)
            + self._w[f"{self._layer}.self_attn.o_proj.weight"] @ mixed
        )
        normed = self._norm(x, f"{self._layer}.post_attention_layernorm")
        gate, up = (self._w[f"{self._layer}.mlp.{n}_proj.weight"] @ normed for n in ("gate", "up"))
        inner = torch.sigmoid(gate) * gate * up
        return x + self._w[f"{self._layer}.mlp.down_proj.weight"] @ inner

    def _residual(self, states: torch.Tensor, tokens: list[int]) -> torch.Tensor:
        """What the layer's output at the last position is added to."""
        if self.config.get("norm_before_residual"):
            return self._norm(states[-1], f"{self._layer}.hidden_norm")
        return states[-1]

    def _logits(self, state: torch.Tensor) -> torch.Tensor:
        return self._lm_head @ self._norm(state, "norm")

    def _join(self, states: torch.Tensor, tokens: list[int]) -> torch.Tensor:
        embedded = self._norm(self._embedding[tokens], "midlayer.input_layernorm")
        return torch.cat((embedded, self._norm(states.double(), "midlayer.hidden_norm")), dim=-1)

    def _project(self, joined: torch.Tensor, name: str) -> torch.Tensor:
        out = joined @ self._w[f"{self._layer}.self_attn.{name}.weight"].T
        bias = self._w.get(f"{self._layer}.self_attn.{name}.bias")
        out = out if bias is None else out + bias
        return out.unflatten(-1, (-1, self.config["head_dim"]))

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        scale = (x.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"]).rsqrt()
        return x * scale * self._w[f"{name}.weight"]

    def _rotate(self, x: torch.Tensor, begin: int) -> torch.Tensor:
        """[n, heads, dim] at positions `begin` on, as complex numbers of both halves."""
        half = x.shape[-1] // 2
        base = self.config["rope_theta"]
        speeds = base ** (-torch.arange(half, dtype=torch.float64) / half)
        angles = torch.outer(torch.arange(begin, begin + len(x), dtype=torch.float64), speeds)
        turned = torch.complex(x[..., :half], x[..., half:]) * torch.exp(1j * angles)[:, None]
        return torch.cat((turned.real, turned.imag), dim=-1)


class NaiveEagle(NaiveHead):
    """The same for EAGLE-1, as `make_tiny_eagle` writes it; its states are the target's last."""

    _layer = "layers.0"

    def fuse(self, aux: torch.Tensor) -> torch.Tensor:
        """Hidden states [n, hidden], unchanged."""
        return aux.double()

    def _join(self, states: torch.Tensor, tokens: list[int]) -> torch.Tensor:
        joined = torch.cat((self._embedding[tokens], states.double()), dim=-1)
        out = joined @ self._w["fc.weight"].T
        return out + self._w["fc.bias"] if "fc.bias" in self._w else out

    def _residual(self, states: torch.Tensor, tokens: list[int]) -> torch.Tensor:
        return self._join(states, tokens)[-1]

    def _logits(self, state: torch.Tensor) -> torch.Tensor:
        return self._lm_head @ state


def head_entries(target: DecoderOnlyLM, draft_dir: Path) -> torch.Tensor:
    """The head's entries in the pages of a text of twelve tokens."""
    model = DraftedModel(target, load_draft_head(draft_dir, target), 1, 16)
    driver = PagedDriver(model, num_pages=4)
    driver.step([(PagedRequest(), list(range(3, 15)))])
    return driver.pool[:, :, target.config.num_layers].nan_to_num(0.0)
