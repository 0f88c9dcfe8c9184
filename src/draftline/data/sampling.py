"""How answers are drawn; the same words for a server and for a model in this process."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from draftline.config import Frozen


class Sampling(Frozen):
    """Sampling of answers. It should be what the drafter will meet when it is served."""

    max_new_tokens: int = Field(default=2048, ge=1)
    """Tokens of one answer; a longer one is cut off and marked."""
    temperature: float | None = Field(default=None, ge=0)
    """0 is greedy; none takes the target's own default."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """Nucleus; none takes the target's own default."""
    thinking: bool | None = None
    """The template's thinking switch; none takes the template's own default."""

    def fields(self) -> dict[str, Any]:
        """The OpenAI fields of what is set, the length apart."""
        chosen = {"temperature": self.temperature, "top_p": self.top_p}
        return {name: value for name, value in chosen.items() if value is not None}
