"""CORE's files by name: downloads the public evaluation bundle of nanochat and unpacks the files of the 22 tasks.

The bundle is a zip with core.yaml, whose `dataset_uri` of each task is a path in the bundle's data folder. Without that
file, tasks are found by the names of their files. Nothing else of the zip is unpacked.
"""

from __future__ import annotations

import re
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path, PurePosixPath

from quern.eval.core.tasks import TASKS
from quern.temporaries import TemporaryFolder, alone_in, remove_abandoned, sync_path
from quern.terminal import Meter
from quern.text.downloads import retrieve

ARCHIVE, CONFIG = "eval_bundle.zip", "core.yaml"
BUNDLE = (
    f"https://karpathy-public.s3.us-west-2.amazonaws.com/{ARCHIVE}",
    "90a7c19e28ee7a52b4f6e1f87658deb9fde7f63deba2379045bdb1fe9ea5d200",
)
"""The address of the files of CORE's 22 tasks, and the SHA-256 of what is there."""


def core_bundle(out: Path, log: Callable[[str], None], bundle: tuple[str, str] = BUNDLE) -> Path:
    """The folder with the files of CORE's tasks; downloads and unpacks the bundle if the folder is not there.

    Args:
        out: The output folder.
        log: Called with a line when this process waits for another one's download.
        bundle: The address and the SHA-256 of what is downloaded.

    Raises:
        OSError: The bundle cannot be downloaded; the message says what to do.
        ValueError: The bundle is damaged, or has no task of CORE.
    """
    folder = out / "downloads" / "core"
    unpacked = folder / "eval_data"
    if unpacked.is_dir():
        return unpacked
    try:
        with alone_in(folder, log), Meter("fetching the evaluation bundle", None, "MB of this file") as meter:
            retrieve(*bundle, folder / ARCHIVE, lambda file, done, total: meter.at(done / 1e6, file))
    except OSError as error:
        raise OSError(f"{error}; or name a folder with CORE's files with --bundle") from error
    _unpack(folder / ARCHIVE, unpacked)
    return unpacked


def _unpack(archive: Path, target: Path) -> None:
    """Writes the files of the tasks to a temporary folder; whole, it gets its name."""
    remove_abandoned(target.parent, target.name)
    temporary = TemporaryFolder(target)
    try:
        with zipfile.ZipFile(archive) as opened:
            for name in _wanted(opened, archive):
                sync_path(Path(opened.extract(name, temporary.path / target.name)))
        (temporary.path / target.name).rename(target)
        sync_path(target.parent)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise ValueError(f"{archive} is damaged ({error}): remove it and run this again") from error
    except OSError:
        if not target.is_dir():  # another process may have unpacked the same files first
            raise
    finally:
        temporary.remove()


def _wanted(opened: zipfile.ZipFile, archive: Path) -> list[str]:
    """The names of the tasks' files in the bundle."""
    names = [name for name in opened.namelist() if not name.endswith("/")]
    for name in names:
        if name.startswith("/") or "\\" in name or ".." in PurePosixPath(name).parts:
            raise ValueError(f"{archive} has the entry '{name}', which leaves its folder: get the bundle elsewhere")
    configs = [name for name in names if PurePosixPath(name).name == CONFIG]
    listed = (
        re.findall(r"dataset_uri:\s*[\"']?([^\s\"'#]+)", opened.read(configs[0]).decode("utf-8")) if configs else []
    )
    files = {f"{task.file}{suffix}" for task in TASKS for suffix in (".jsonl", ".jsonl.gz")}
    own = [name for name in names if PurePosixPath(name).name in files]
    if listed:  # a file that the configuration does not name may have the same name and other rows
        own = [name for name in own if any(f"/{name}".endswith(f"/{uri}") for uri in listed)]
    if not own:
        raise ValueError(f"{archive} has no file of CORE's tasks: get the bundle elsewhere")
    return own
