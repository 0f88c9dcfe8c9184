"""Two threads compile the same function at once and train with it, without disturbing each other."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from draftline.compiling import cache_entries, compile_isolated, gate, seal, tripwire

DEVICE, BACKEND = ("cuda", "inductor") if torch.cuda.is_available() else ("cpu", "aot_eager")


def loss(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:  # x [rows, width], weight [width, width]
    return torch.nn.functional.gelu(x @ weight).square().mean()


def prepare(worker: str) -> Callable[[], str]:
    compiled = compile_isolated(loss, worker, backend=BACKEND)
    x = torch.ones(8, 16, device=DEVICE)
    weight = torch.ones(16, 16, device=DEVICE, requires_grad=True)
    with gate.compiling(worker, deadline_s=600):  # whoever is inside is alone
        compiled(x, weight).backward()

    def train() -> str:
        for _ in range(100):
            compiled(x, weight).backward()
        return f"{worker}: 101 steps, {cache_entries(compiled)} compilation"

    return train


if __name__ == "__main__":
    tripwire.arm()  # dense flex_attention is an error from here on
    with ThreadPoolExecutor(2) as threads:
        trainers = list(threads.map(prepare, ["worker-0", "worker-1"]))
        seal()  # and so is whatever would compile
        print(*threads.map(lambda train: train(), trainers), sep="\n")
