"""What arrives for a model, for those who decide how many workers it should have."""

from __future__ import annotations

from weft.common.capacity import NUM_SIZES, size_of_prompt
from weft.contract.errors import Overloaded, TargetUnattainable, WeftError
from weft.v1 import mesh_pb2


class ModelDemand:
    """Counts since the gateway's start. Requests count when they have passed their checks, whatever
    becomes of them: answers alone would not show an overload.
    """

    def __init__(self) -> None:
        self.requests = self.refused_requests = 0
        self.prompts = [0] * NUM_SIZES
        self.prompt_tokens = [0] * NUM_SIZES
        self.ended_prompts = self.ended_prompt_tokens = 0
        self.cached_tokens = self.output_tokens = 0

    def arrived(self) -> None:
        self.requests += 1

    def sized(self, num_tokens: int) -> None:
        """A prompt's tokens are known."""
        size = size_of_prompt(num_tokens)
        self.prompts[size] += 1
        self.prompt_tokens[size] += num_tokens

    def failed(self, error: BaseException | None) -> None:
        """A request failed before it was sent to a worker."""
        if isinstance(error, WeftError):
            self.refused_requests += isinstance(error, (Overloaded, TargetUnattainable))

    def ended(self, num_prompts: int, prompt_tokens: int, cached: int, output_tokens: int) -> None:
        """The prompts of a request have ended."""
        self.ended_prompts += num_prompts
        self.ended_prompt_tokens += prompt_tokens
        self.cached_tokens += cached
        self.output_tokens += output_tokens

    def describe(self, model: str) -> mesh_pb2.MeshDemand:
        return mesh_pb2.MeshDemand(
            model=model,
            requests=self.requests,
            refused_requests=self.refused_requests,
            prompts=self.prompts,
            prompt_tokens=self.prompt_tokens,
            ended_prompts=self.ended_prompts,
            ended_prompt_tokens=self.ended_prompt_tokens,
            cached_tokens=self.cached_tokens,
            output_tokens=self.output_tokens,
        )
