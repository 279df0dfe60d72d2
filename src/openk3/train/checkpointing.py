"""Checkpoints of a run: written so that a crash, a full disk or a loss of power leaves the last one whole, and read so that damage is seen.

A checkpoint is a directory in the release's layout, the tokenizer's files beside the weights, `training.pt` with everything that going on
needs, and `manifest.json` with the size and SHA-256 of each file. It is written under a temporary name, synchronised and renamed.
"""

from __future__ import annotations

import errno
import hashlib
import io
import json
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from openk3.checkpoint.save import save_release
from openk3.errors import UserError
from openk3.model.decoder import Decoder
from openk3.train.run import TEMPORARY, sync_directory

MANIFEST = "manifest.json"
TRAINING = "training.pt"
_STEP = re.compile(r"step-(\d{8,})")
_SYSTEM_ERROR = re.compile(r"os error (\d+)")
_OUT_OF_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True)
class Checkpoint:
    """One complete checkpoint of a run."""

    path: Path
    step: int

    def verify(self) -> str | None:
        """What is wrong with its files, compared with the manifest byte for byte; None when nothing is."""
        try:
            files = json.loads((self.path / MANIFEST).read_text(encoding="utf-8"))["files"]
            for name, stated in files.items():
                size = (self.path / name).stat().st_size
                if size != stated["size"]:
                    return f"{name} has {size} bytes, not {stated['size']}: it is truncated or was changed"
                if _sha256(self.path / name) != stated["sha256"]:
                    return f"the content of {name} is damaged or was changed"
        except FileNotFoundError as error:
            return f"{Path(error.filename).name} is missing"
        except OSError as error:
            return f"it cannot be read: {error.strerror}"
        except (ValueError, KeyError, TypeError, AttributeError):
            return f"{MANIFEST} is damaged"
        return None if TRAINING in files else f"{MANIFEST} does not list {TRAINING}"

    def training_state(self) -> dict[str, Any]:
        """What `save` was given. Raises UserError when it cannot be read."""
        file = self.path / TRAINING
        try:
            state = torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:  # torch.load has no error type of its own
            raise UserError(f"{file} cannot be read: {error}") from None
        if not isinstance(state, dict):
            raise UserError(f"{file} holds no training state")
        return state


def listed(directory: Path) -> list[Checkpoint]:
    """The checkpoints in `directory`, oldest first. Complete ones only: others bear a temporary name."""
    found = [Checkpoint(entry, int(match[1])) for entry in directory.glob("step-*") if (match := _STEP.fullmatch(entry.name))]
    return sorted(found, key=lambda checkpoint: checkpoint.step)


def newest_good(directory: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint that is whole, and a line about each newer one that is not."""
    complaints: list[str] = []
    for checkpoint in reversed(listed(directory)):
        complaint = checkpoint.verify()
        if complaint is None:
            return checkpoint, complaints
        complaints.append(f"{checkpoint.path}: {complaint}")
    return None, complaints


def set_aside(directory: Path, newer_than: int) -> None:
    """Rename the checkpoints after the step `newer_than`, so that nothing takes them for good; they stay for whoever wants to look."""
    for checkpoint in listed(directory):
        if checkpoint.step > newer_than:
            damaged = directory / f"damaged-{checkpoint.path.name}"
            shutil.rmtree(damaged, ignore_errors=True)
            os.rename(checkpoint.path, damaged)


def save(directory: Path, step: int, model: Decoder, companions: Sequence[Path], training: dict[str, Any], keep: int) -> Checkpoint:
    """Write the checkpoint of `step` into `directory` and forget all but the newest `keep`.

    `companions` are files copied beside the weights. `training` holds tensors, numbers, strings, lists and dicts. Raises UserError
    when the disk is full or fails; what was written of it is gone then, and the older checkpoints are untouched.
    """
    target = directory / f"step-{step:08d}"
    temporary = directory / f"{TEMPORARY}{target.name}"
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        _write(temporary, step, model, companions, training)
        if target.exists():
            # Only a damaged one is ever written again: the run went on from an older checkpoint.
            damaged = directory / f"{TEMPORARY}damaged-{target.name}"
            shutil.rmtree(damaged, ignore_errors=True)
            os.rename(target, damaged)
            shutil.rmtree(damaged, ignore_errors=True)
        os.rename(temporary, target)
        sync_directory(directory)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        reason = _storage_fault(error)
        if reason is None:
            raise
        kept = listed(directory)
        last = f"the checkpoint of step {kept[-1].step} is whole" if kept else "there is no older one"
        raise UserError(f"the checkpoint of step {step} could not be written to {directory}: {reason}; {last}") from error
    for old in listed(directory)[:-keep]:
        # Renamed first: a half-deleted checkpoint must not look like a damaged one.
        doomed = directory / f"{TEMPORARY}old-{old.path.name}"
        os.rename(old.path, doomed)
        shutil.rmtree(doomed, ignore_errors=True)
    return Checkpoint(target, step)


def _write(directory: Path, step: int, model: Decoder, companions: Sequence[Path], training: dict[str, Any]) -> None:
    save_release(model, directory)
    for companion in companions:
        shutil.copyfile(companion, directory / companion.name)
    _write_training(directory / TRAINING, training)
    files = {
        entry.name: {"size": entry.stat().st_size, "sha256": _sha256(entry)} for entry in sorted(directory.iterdir()) if entry.is_file()
    }
    (directory / MANIFEST).write_text(json.dumps({"step": step, "files": files}, indent=2) + "\n", encoding="utf-8")
    for name in [*files, MANIFEST]:
        _sync(directory / name)
    sync_directory(directory)


class _Recorded(io.FileIO):
    """A file that keeps the system's error: torch replaces it by one of its own, which does not say what happened."""

    error: OSError | None = None

    def write(self, data: Any, /) -> int:
        """Write all of `data`. Raises OSError."""
        view = memoryview(data).cast("B")
        done = 0
        try:
            while done < len(view):
                done += super().write(view[done:])
        except OSError as error:
            self.error = error
            raise
        return done


def _write_training(path: Path, training: dict[str, Any]) -> None:
    with _Recorded(path, "w") as file:
        try:
            torch.save(training, file)
        except Exception:
            if file.error is not None:
                raise file.error from None
            raise


def _storage_fault(error: BaseException) -> str | None:
    """Why the file system refused, or None when `error` is about something else. safetensors has the system's number in its own words."""
    number = error.errno if isinstance(error, OSError) else None
    if number is None and (match := _SYSTEM_ERROR.search(str(error))):
        number = int(match[1])
    if number is None:
        return str(error) if isinstance(error, OSError) else None
    return os.strerror(number) + ("; make room and resume" if number in _OUT_OF_ROOM else "")


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
