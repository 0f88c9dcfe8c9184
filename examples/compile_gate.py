"""Two threads, each with a compiled function of its own, that cannot disturb each other."""

import threading

import torch

from draftline.compiling import cache_entries, compile_isolated, gate, seal, tripwire


def loss(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:  # x [rows, width], weight [width, width]
    return torch.nn.functional.gelu(x @ weight).square().mean()


def work(name: str, device: str, all_warm: threading.Barrier) -> None:
    compiled = compile_isolated(loss, name, backend="inductor" if device != "cpu" else "aot_eager")
    x = torch.ones(8, 16, device=device)
    weight = torch.ones(16, 16, device=device, requires_grad=True)
    with gate.compiling(name, deadline_s=600):
        compiled(x, weight).backward()
    all_warm.wait(600)  # the main thread seals the process here
    for _ in range(100):
        compiled(x, weight).backward()
    print(f"{name}: 101 steps, {cache_entries(compiled)} compilation, gradient {weight.grad.norm():.4f}")


if __name__ == "__main__":
    tripwire.arm()
    all_warm = threading.Barrier(2, action=seal)
    devices = [
        f"cuda:{i % torch.cuda.device_count()}" if torch.cuda.is_available() else "cpu" for i in range(2)
    ]
    threads = [
        threading.Thread(target=work, args=(f"worker-{i}", device, all_warm))
        for i, device in enumerate(devices)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
