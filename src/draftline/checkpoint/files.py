"""The file system of a checkpoint: that of fsio.py, and one more step, a file of tensors."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from draftline.resilience.fsio import FileSystem

_OS_ERROR = re.compile(r"\(os error (\d+)\)")


class CheckpointFileSystem(FileSystem):
    """The real file system, with safetensors files."""

    def write_tensors(self, path: Path, tensors: Mapping[str, Tensor]) -> None:
        """Create a safetensors file from contiguous CPU tensors."""
        # safetensors replaces the file by a private one (mode 0600) that a server running as another user
        # could not read; the umask of an ordinary file is what the user asked for.
        path.touch()
        mode = path.stat().st_mode & 0o777
        with _safetensors_errors_as_os_errors(path):
            save_file(dict(tensors), path, metadata={"format": "pt"})
        path.chmod(mode)


@contextmanager
def _safetensors_errors_as_os_errors(path: Path) -> Iterator[None]:
    """safetensors hides the errno in its message, and a full disk must be told from other failures."""
    try:
        yield
    except SafetensorError as error:
        code = _OS_ERROR.search(str(error))
        if code is None:
            raise
        raise OSError(int(code[1]), os.strerror(int(code[1])), str(path)) from error
