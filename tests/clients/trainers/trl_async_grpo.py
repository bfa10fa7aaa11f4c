"""TRL's async GRPO trainer in its LoRA mode, whose policy a mesh serves: a toy task.

    python trl_async_grpo.py MODEL URL OUT

An answer's reward is the share of its tokens with an even id. TRL saves each policy as an adapter
below OUT, a folder below the mesh's adapter root, and lets the mesh load it. What only GPUs have
gets a stand-in here: the attention kernel of the trainer's own model, that GPU's peak rate, and the
package `vllm`, of which the LoRA mode asks only whether it is installed. It prints the mean reward
of each update as a line of JSON.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoTokenizer, TrainerCallback
from trl.chat_template_utils import qwen2_5_chat_template
from trl.experimental.async_grpo import (
    AsyncGRPOConfig,
    AsyncGRPOTrainer,
    async_grpo_trainer,
    async_rollout_worker,
    packing,
)

UPDATES = 20
ANSWERS = 64


class Attention:
    """FlashAttention's call for several sequences one behind the other."""

    def flash_attn_varlen_func(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        query_ends: torch.Tensor,
        key_ends: torch.Tensor,
        longest_query: int,
        longest_key: int,
        softmax_scale: float | None = None,
        causal: bool = True,
        window_size: tuple[int, int] = (-1, -1),
    ) -> torch.Tensor:
        """[rows, heads, dim]. The last query of a sequence sees its last key."""
        assert causal
        assert window_size == (-1, -1)
        rows = []
        queries, keys = query_ends.tolist(), key_ends.tolist()
        for at in range(len(queries) - 1):
            q = query[queries[at] : queries[at + 1]].transpose(0, 1)
            k, v = (x[keys[at] : keys[at + 1]].transpose(0, 1) for x in (key, value))
            mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool)
            mask = mask.tril(k.shape[1] - q.shape[1])
            rows.append(
                torch.nn.functional.scaled_dot_product_attention(
                    q, k, v, attn_mask=mask, scale=softmax_scale, enable_gqa=True
                ).transpose(0, 1)
            )
        return torch.cat(rows)


# At the top, since the process that samples imports this file too.
packing._flash_attn = Attention
async_rollout_worker.is_vllm_available = lambda *_, **__: True
async_grpo_trainer.get_peak_flops_per_device = lambda *_: None


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [sum(id_ % 2 == 0 for id_ in ids) / max(1, len(ids)) for ids in completion_ids]


class Rewards(TrainerCallback):
    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if logs and "reward" in logs:
            print(json.dumps({"step": state.global_step, "reward": logs["reward"]}), flush=True)


def main(model: str, url: str, out: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.chat_template = qwen2_5_chat_template  # TRL reads answers of known ones only.
    prompt = [{"role": "user", "content": "Count two by two."}]
    trainer = AsyncGRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=AsyncGRPOConfig(
            output_dir=out,
            vllm_server_base_url=url,
            max_steps=UPDATES,
            per_device_train_batch_size=ANSWERS,
            num_generations=ANSWERS,
            max_completion_length=16,
            max_staleness=1,
            learning_rate=5e-2,
            token_budget=0,
            bf16=False,
            use_cpu=True,
            gradient_checkpointing=False,
            report_to="none",
            save_strategy="no",
        ),
        train_dataset=Dataset.from_dict({"prompt": [prompt] * 64}),
        processing_class=tokenizer,
        peft_config=LoraConfig(
            r=8, lora_alpha=64, target_modules="all-linear", task_type="CAUSAL_LM"
        ),
        callbacks=[Rewards()],
    )
    trainer.train()


if __name__ == "__main__":
    main(*sys.argv[1:])
