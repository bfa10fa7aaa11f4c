"""Settings that cannot work are refused by `weft up` before a worker starts, in the engine's words:
each refusal of `check_combination` here, and a list of those that only a machine can tell.
"""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest
from weft.cli.main import main
from weft.cli.up import command
from weft.cli.up.checks import check_workers
from weft.cli.up.plan import ModelFolder, plan_mesh
from weft.cli.up.settings import UpSettings
from weft.cli.up.state import StateFolder
from weft.common.settings import load_settings
from weft.contract.errors import WeftError
from weft.decode.main import DecodeSettings
from weft.engine.base.config import EngineConfig
from weft.engine.loop.build import load_parts
from weft.engine.loop.combinations import check_combination
from weft.testing.models.families import SIZES
from weft.testing.models.tiny_models import tiny_config

ROOT = Path(__file__).resolve().parents[3]
FOLDERS = (ROOT / "engine" / "weft" / "engine", ROOT / "pages" / "weft" / "pages")


def family(architecture: str, **fields: Any) -> dict[str, Any]:
    return {**SIZES, "architectures": [architecture], **fields}


HYBRID = {"layer_types": ["mamba", "mamba", "attention", "mamba"], "num_local_experts": 0,
          "mamba_n_heads": 6, "position_embedding_type": "nope"}  # fmt: skip
LATENT = {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 12,
          "n_routed_experts": 4, "first_k_dense_replace": 1, "q_lora_rank": 12,
          "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_shared_experts": 1,
          "head_dim": 16}  # fmt: skip
BERT = {"architectures": ["BertModel"], "model_type": "bert", "vocab_size": 517, "hidden_size": 72,
        "num_hidden_layers": 2, "num_attention_heads": 6, "intermediate_size": 136,
        "max_position_embeddings": 64, "type_vocab_size": 2, "hidden_act": "gelu",
        "layer_norm_eps": 1e-12}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "llama": tiny_config("llama"),
    "wide": tiny_config("llama", head_dim=32),
    "other": tiny_config("llama", vocab_size=300),
    "windows": tiny_config("mistral", sliding_window=20),
    "hybrid": family("GraniteMoeHybridForCausalLM", **HYBRID),
    "jamba": family("JambaForCausalLM", attn_layer_period=2, attn_layer_offset=1, num_experts=1,
                    num_experts_per_tok=1, expert_layer_period=2, expert_layer_offset=1,
                    mamba_d_state=8, mamba_d_conv=4, mamba_expand=2, mamba_dt_rank=4),
    "latent": family("DeepseekV2ForCausalLM", **LATENT),
    "uneven": family("Gemma4ForCausalLM", attention_k_eq_v=True, sliding_window=20,
                     layer_types=["full_attention", "sliding_attention"] * 2),
    "bert": BERT,
}  # fmt: skip
HEAD = {
    "architectures": ["LlamaForCausalLMEagle3"], "hidden_size": 72, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 24, "intermediate_size": 104, "vocab_size": 517,
    "draft_vocab_size": 150, "rms_norm_eps": 1e-5, "num_hidden_layers": 1,
}  # fmt: skip

REFUSED: list[tuple[str, list[str], str]] = [
    ("llama", ["--drafter", "ngram", "--decode-args", "--draft-width 2"],
     "decode-0: draft_width = 2: must be 1 unless drafter = eagle3"),
    ("llama", ["--draft-dir", "head", "--decode-args", "--draft-width 2 --deterministic"],
     "decode-0: draft_width = 2: must be 1 with deterministic"),
    ("llama", ["--prefill-args", "--max-step-tokens 16"], "prefill-0: max_step_tokens = 16"),
    ("llama", ["--host-cache-bytes", "1000000", "--decode-args", "--no-prefix-cache"],
     "decode-0: prefix_cache = False: must be on with host_cache_bytes"),
    ("llama", ["--dtype", "float16"], "dtype: float16 is not supported on a CPU"),
    ("llama", ["--tp", "4"], "tp = 4: .*cannot be divided evenly"),
    ("jamba", ["--tp", "2"], "tp = 2: JambaForCausalLM is not divided"),
    ("llama", ["--tp", "2", "--dcp", "2"], "KV heads are each on 1 rank, so dcp can be 1$"),
    ("llama", ["--tp", "2", "--decode-args", "--device cpu,cpu,cpu"],
     "device = cpu,cpu,cpu: must be one device, or one for each"),
    ("llama", ["--prefill-args", "--cp 2 --tp 2"], "cp = 2: must be 1 with tp or pp"),
    ("jamba", ["--prefill-args", "--cp 2"], "recurrent layers pass a state .*take pp"),
    ("llama", ["--attention-dp", "2", "--decode", "2", "--prefill", "0"],
     "attention_dp = 2: must be 1 for LlamaForCausalLM: it has no experts to share"),
    ("latent", ["--attention-dp", "2", "--decode", "2", "--prefill", "0", "--tp", "2"],
     "attention_dp = 2: must be 1 with tp, pp or cp"),
    ("latent", ["--attention-dp", "2", "--decode", "2", "--prefill", "0", "--adapter-root", ".",
                "--decode-args", "--lora-projections experts"],
     "decode-0: lora_projections: with attention_dp adapters do not change experts"),
    ("llama", ["--drafter", "mtp"], "has no MTP head: LlamaForCausalLM brings none"),
    ("wide", ["--draft-dir", "head"], "head_dim of the draft head is 24, of the target model 32"),
    ("llama", ["--draft-dir", "head", "--drafter", "eagle"], "is for the drafter eagle3"),
    ("uneven", ["--draft-dir", "head"], "Gemma4ForCausalLM do not support draft heads"),
    ("windows", ["--draft-dir", "head", "--decode-args", "--draft-width 2"],
     "decode-0: draft_width = 2: layers of this model attend to the last 20 positions"),
    ("llama", ["--draft-dir", "other", "--drafter", "model"],
     "decode-0: draft_dir = .*vocab_size of the draft model is 300.* as many rows, padded ones"),
    ("llama", ["--draft-dir", "other", "--drafter", "model", "--tp", "2"],
     "decode-0: tp = 2: must be 1 with drafter = model"),
    ("hybrid", ["--draft-dir", "other", "--drafter", "model"],
     "decode-0: drafter = model: must be none, ngram or mtp for models with recurrent"),
    ("other", ["--draft-dir", "hybrid", "--drafter", "model"], "draft_dir = .*vocab_size"),
    ("hybrid", ["--decode-args", "--deterministic"], "decode-0: deterministic = True"),
    ("hybrid", ["--decode-args", "--device cuda --drafter ngram --max-draft-tokens 16"],
     "decode-0: max_draft_tokens = 16: must be below page_size"),
    ("jamba", ["--prefill-args", "--device cuda"], "prefill-0: device = cuda: must be cpu"),
    ("latent", ["--decode-args", "--deterministic"], "deterministic: latent attention"),
    ("llama", ["--decode-args", "--deterministic --device cuda --dtype float32"],
     "deterministic: products in float32"),
    ("bert", ["--decode-args", "--kv-dtype int8"],
     "decode-0: kv_dtype = int8: encoders keep no KV"),
    ("llama", ["--kv-dtype", "int8", "--decode-args", "--page-size 16"],
     "kv_dtype = int8: there is no kernel for heads of no multiple of 16"),
    ("bert", ["--decode-args", "--drafter ngram"], "the model serves the task embed"),
    ("bert", ["--task", "generate"], "cannot serve the task generate"),
    ("llama", ["--adapter-root", ".", "--decode-args", "--lora-projections experts"],
     "decode-0: lora_projections = experts: this model has q, k, v"),
    ("llama", ["--adapter-root", ".", "--prefill-args", "--lora-whole-matrices 1"],
     "prefill-0: lora_whole_matrices = 1: lora_projections names neither"),
    ("llama", ["--adapter-root", ".", "--prefill-args", "--lora-added-tokens 4"],
     "prefill-0: lora_added_tokens = 4: lora_projections does not name embed_tokens"),
    ("llama", ["--adapter-root", ".", "--adapter", "a=missing"], "there is no such directory"),
]  # fmt: skip


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Configurations without weights, as folders of the current one."""
    for name, config in {**MODELS, "head": HEAD}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def plan(folder: Path, model: str, flags: list[str]) -> Any:
    has_device = any("--device" in flag for flag in flags)
    settings = load_settings(UpSettings, [*flags, *([] if has_device else ["--device", "cpu"])], {})
    models = [ModelFolder(model, folder / model)]
    return plan_mesh(settings, StateFolder(folder / "state"), models, None)


@pytest.mark.parametrize(("model", "flags", "told"), REFUSED)
def test_what_cannot_work_is_refused_early(
    model: str, flags: list[str], told: str, folders: Path
) -> None:
    with pytest.raises(WeftError, match=told):
        check_workers(plan(folders, model, flags).services)


def test_flags_that_contradict_one_another_are_refused_with_their_worker(
    folders: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(WeftError, match="decode-0: has the settings refused above"):
        check_workers(plan(folders, "llama", ["--decode-args", "--tls-cert x"]).services)
    assert "--tls-cert, --tls-key and --tls-ca: give all three" in capsys.readouterr().err


def test_places_that_there_are_not_are_refused(folders: Path) -> None:
    for flags in ("--numa-bind-nodes 1000", "--numa-bind-cpus 100000", "--nics mlx5_1000"):
        with pytest.raises(WeftError, match=r"^decode-0: (numa_bind_nodes|numa_bind_cpus|nics): "):
            check_workers(plan(folders, "llama", ["--decode-args", flags]).services)


@pytest.mark.parametrize("model", MODELS)
def test_what_can_work_is_not(model: str, folders: Path) -> None:
    check_workers(plan(folders, model, []).services)
    if model == "llama":
        check_workers(plan(folders, model, ["--draft-dir", "head"]).services)
        check_workers(plan(folders, model, ["--adapter-root", "."]).services)


def refusal_of(config: EngineConfig) -> WeftError | None:
    try:
        check_combination(config)
    except WeftError as error:
        return error
    return None


def test_the_engine_says_the_same_before_it_reads_weights(folders: Path) -> None:
    num_compared = 0
    for model, flags, _ in REFUSED:
        (spec,) = (s for s in plan(folders, model, flags).services if s.name == "decode-0")
        settings = load_settings(DecodeSettings, spec.command[5:], {})
        try:
            config = settings.engine_config("decode", "decode-0")
        except WeftError:
            continue  # Settings alone: no engine is made of them.
        if (error := refusal_of(config)) is not None:
            with pytest.raises(type(error)) as caught:
                load_parts(config)
            assert caught.value.message == error.message
            num_compared += 1
    assert num_compared > 12


@pytest.mark.parametrize("others", [[], ["llama"], ["wide"]])
def test_models_that_cannot_have_8_bits(
    others: list[str],
    folders: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """They are started without, beside models that can; alone the flag is refused."""
    started: list[tuple[str, ...]] = []

    async def run(services: Any, *_: Any, **__: Any) -> None:
        started.extend(spec.command for spec in services)

    monkeypatch.setattr(command, "run_mesh", run)
    models = [part for name in ["latent", *others] for part in ("--model", str(folders / name))]
    flags = [*models, "--kv-dtype", "fp8_e4m3", "--no-rest", "--plain", "--device", "cpu"]
    flags += ["--state-dir", str(folders / "state"), "--grpc-port", "50991"]
    status = main(["up", *flags])
    told = capsys.readouterr()
    if others == ["wide"]:
        assert status == 0
        with_flag = {c[c.index("--model-name") + 1] for c in started if "--kv-dtype" in c}
        assert with_flag == {"wide"}
    else:
        assert status == 1
        assert not started
        assert "latent (there is no kernel for heads of no multiple of 16 elements)" in told.err


LATE = {
    "executor/shared_tensors.py": "what a trainer sends",
    "base/gpus.py": "GPUs of this machine",
    "base/machine_lock.py": "another process",
    "base/triton_compiler.py": "compilers of this machine",
    "executor/adapter_rows.py": "sizes of memory",
    "executor/device.py": "GPUs and native operations of this machine",
    "executor/device_arena.py": "memory of GPUs",
    "executor/device_pool.py": "memory of GPUs",
    "executor/expert_moves.py": "how weights are packed",
    "executor/graphs.py": "memory of GPUs",
    "executor/kv_format.py": "compute capability",
    "executor/local.py": "memory",
    "executor/memory_plan.py": "memory",
    "executor/refits.py": "a command",
    "executor/ranks/attention_dp.py": "other workers",
    "executor/ranks/follow.py": "memory of ranks",
    "executor/ranks/share.py": "memory of ranks",
    "executor/ranks/host_memory.py": "other hosts",
    "executor/ranks/hosts.py": "other hosts",
    "executor/ranks/host_writes.py": "other hosts",
    "executor/ranks/leader.py": "processes of ranks",
    "parallel/device_dispatch.py": "GPUs of this machine",
    "parallel/nccl_links.py": "other hosts",
    "executor/sleeping.py": "a command",
    "executor/states.py": "memory",
    "executor/weight_groups.py": "a command",
    "loop/pools.py": "memory",
    "loop/sleep.py": "a command",
    "loop/weights.py": "a command",
    "model/archs/by_transformers/model.py": "heads that the model's code shows",
    "model/archs/by_transformers/plan.py": "the plan of transformers' classes",
    "model/refit.py": "a command",
    "parallel/device_peers.py": "GPUs of this machine",
    "parallel/device_stages.py": "GPUs of this machine",
    "parallel/host_sockets.py": "network",
    "parallel/lockstep.py": "native operations of this machine",
    "parallel/nccl_id.py": "a command",
    "parallel/segment.py": "shared memory",
    "parallel/shared.py": "shared memory",
    "scheduler/adapters.py": "a request",
    "sources/tiers/build.py": "memory",
    "tiers/disk.py": "disks",
    "transfer/build.py": "memory",
    "transfer/mover.py": "memory",
    "transfer/staging_memory.py": "memory",
    "transfer/transport.py": "libraries",
}
"""Modules of engine and pages that refuse settings because of the machine as well."""
EARLY = {
    "base/config.py",
    "base/placement.py",
    "executor/adapter_projections.py",
    "loop/combinations.py",
    "parallel/shards.py",
    "parallel/stages.py",
}
"""Modules that `check_workers` asks, beside those of `weft.checkpoint`."""


def test_every_refusal_is_early_or_of_the_machine() -> None:
    """A new one belongs to `check_workers` if settings and configurations tell it."""
    found = {
        str(path.relative_to(folder))
        for folder in FOLDERS
        for path in folder.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "ConfigError"
    }
    assert found == EARLY | LATE.keys()
