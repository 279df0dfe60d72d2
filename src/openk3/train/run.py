"""A run directory: what one training run reads and writes.

config.toml           the resolved settings; written last of the preparations, so that its presence means they are complete
config.json           the model's config, which decides; [model] in config.toml says where it came from
tokenizer.json, …     the tokenizer
tokens/               the tokens of the texts, memory-mapped
metrics.jsonl         one JSON object a step
checkpoints/          step-00000500/: weights in the release's layout, and the training state
plot.png              loss, balance and throughput
openk3.lock           held (flock) by the process that trains here; the system lets go of it when the process dies
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from openk3.errors import UserError
from openk3.train.config import TrainConfig

LOCK = "openk3.lock"
_PREPARATIONS = {LOCK, "config.json", "tokenizer.json", "tokenizer_config.json", "tokens"}
TEMPORARY = ".tmp-"
"""What is being written bears a name that begins so, and is renamed when it is complete."""


class RunDirectory:
    """The paths of a run, and its lock. Made by `create` or `open`, which hold the lock until `close`."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock: int | None = lock

    @staticmethod
    def create(path: str | Path) -> RunDirectory:
        """A new run at `path`, locked and empty.

        What a killed preparation left there is cleared. Raises UserError when the directory holds anything else, or is in use.
        """
        path = Path(path).expanduser()
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"the run directory {path} cannot be made: {error.strerror}") from None
        # Only after a look: a lock file in a directory full of other things would be litter.
        _check_free(path)
        run = RunDirectory(path, _lock(path))
        try:
            _check_free(path)
            for entry in path.iterdir():
                if entry.name != LOCK:
                    shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        except BaseException:
            run.close()
            raise
        return run

    @staticmethod
    def open(path: str | Path) -> RunDirectory:
        """The existing run at `path`, locked. Raises UserError when there is none, or another process trains in it."""
        path = Path(path).expanduser()
        if not path.is_dir():
            raise UserError(f"{path} is not a run directory: there is no such directory")
        if not (path / "config.toml").is_file():
            hint = " (its preparation was interrupted: start it again with openk3 train)" if (path / LOCK).exists() else ""
            raise UserError(f"{path} is not a run directory: it holds no config.toml{hint}")
        run = RunDirectory(path, _lock(path))
        run.checkpoints.mkdir(exist_ok=True)
        for leftover in [*path.glob(f"{TEMPORARY}*"), *run.checkpoints.glob(f"{TEMPORARY}*")]:
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
        return run

    @property
    def config_file(self) -> Path:
        """The resolved settings."""
        return self.path / "config.toml"

    @property
    def metrics(self) -> Path:
        """One JSON object a step."""
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        """The directory of checkpoints."""
        return self.path / "checkpoints"

    @property
    def tokens(self) -> Path:
        """The directory of token files."""
        return self.path / "tokens"

    @property
    def plot(self) -> Path:
        """The picture of the run."""
        return self.path / "plot.png"

    def commit(self, config: TrainConfig, model: dict[str, Any]) -> None:
        """Write the settings and the model's config; from now on this is a run that can be resumed."""
        write_atomically(self.path / "config.json", json.dumps(model, indent=2, ensure_ascii=False) + "\n")
        write_atomically(self.config_file, config.to_toml())
        self.checkpoints.mkdir(exist_ok=True)

    def settings(self) -> TrainConfig:
        """The settings it was started with. Raises UserError when the file was damaged."""
        return TrainConfig.from_toml(self.config_file)

    def abandon(self) -> None:
        """Take away what was prepared, after a preparation that failed: the directory is as it was before `create`, or gone."""
        for entry in self.path.iterdir():
            shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        self.close()
        with contextlib.suppress(OSError):
            self.path.rmdir()

    def close(self) -> None:
        """Let go of the lock."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _check_free(path: Path) -> None:
    names = {entry.name for entry in path.iterdir()}
    if "config.toml" in names:
        raise UserError(f"{path} already holds a run: go on with `openk3 resume {path}`, or give another --out")
    # Without the lock file nothing says that openk3 made what lies there.
    half_written = {name for name in names if name.startswith((TEMPORARY, ".tokenizer"))}
    ours = names & _PREPARATIONS | half_written if LOCK in names else set()
    strangers = names - ours
    if strangers:
        raise UserError(f"{path} is not empty (it holds {min(strangers)}) and is no run: give another --out")


def _lock(path: Path) -> int:
    try:
        descriptor = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise UserError(f"{path} cannot be locked: {error.strerror}") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        owner = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip()
        os.close(descriptor)
        by = f" (process {owner})" if owner else ""
        raise UserError(f"another openk3 is training in {path}{by}: wait for it, stop it, or give another directory") from None
    with contextlib.suppress(OSError):  # the number is a courtesy; the lock itself does not need room on the disk
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return descriptor


def write_atomically(path: Path, text: str) -> None:
    """Write `text` to `path` so that a reader, or a crash, sees the old content or the new one, never a part. Raises OSError."""
    temporary = path.with_name(f"{TEMPORARY}{path.name}")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make what was renamed within `path` survive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Metrics:
    """`metrics.jsonl`: one JSON object a step, appended as it happens."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = open(path, "ab", buffering=0)

    def append(self, row: dict[str, Any]) -> None:
        """Write one row, with NaN and infinity as null: JSON has neither. Raises OSError."""
        line = (json.dumps({key: _finite(value) for key, value in row.items()}) + "\n").encode()
        if self._file.write(line) != len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    @staticmethod
    def read(path: Path) -> Iterator[dict[str, Any]]:
        """The rows; a torn last line, which a crash leaves, is passed by."""
        if not path.is_file():
            return
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                row = json.loads(line)
                if isinstance(row, dict) and isinstance(row.get("step"), int):
                    yield row

    @staticmethod
    def truncate(path: Path, step: int) -> None:
        """Forget the rows after `step`: the run goes on from there and will write them again. Raises OSError."""
        rows = [json.dumps(row) for row in Metrics.read(path) if row["step"] <= step]
        write_atomically(path, "".join(f"{row}\n" for row in rows))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    if isinstance(value, float) and value - value != 0.0:
        return None
    return value
