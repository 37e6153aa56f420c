"""The unfinished recording beside its output: what is finished is kept, whatever ends the program.

`OUTPUT.recording/` holds `arguments.json` (what is being recorded) and one routing trace per finished batch.
Each file appears under its name only when it is complete.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import msgspec

from ..errors import SettingError, TraceError
from ..traces.files import replacing, unwritable
from ..traces.routing import RequestRouting, RoutingMeta
from ..traces.routing_file import RoutingFile, write_routing

_ARGUMENTS = "arguments.json"
_LOCK = "lock"


class Journal:
    """The batches of one recording; entered by one process at a time.

    `arguments` are what the recording depends on. Entering raises `SettingError` where the folder holds a
    recording of others, or where another process is at it, and `TraceError` where it cannot be written.
    """

    def __init__(self, output: Path, arguments: Mapping[str, str]) -> None:
        self.folder = output.parent / f"{output.name}.recording"
        self._output = output
        self._arguments = dict(arguments)

    def __enter__(self) -> Journal:
        try:
            self.folder.mkdir(exist_ok=True)
            self._lock = os.open(self.folder / _LOCK, os.O_CREAT | os.O_RDWR, 0o644)
        except OSError as error:
            raise unwritable(self.folder, error) from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._check_arguments()
        except BlockingIOError:
            os.close(self._lock)
            raise SettingError(
                f"{self.folder} is being written by another run. Wait for it, or choose another --output."
            ) from None
        except BaseException:
            os.close(self._lock)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._lock)

    def has(self, batch: int, requests: int, meta: RoutingMeta) -> bool:
        """Whether that batch is finished; a file that is not it, whole, is removed."""
        part = self._part(batch)
        if not part.exists():
            return False
        with suppress(TraceError):
            found = RoutingFile(part)
            if found.requests == requests and found.meta == meta:
                return True
        part.unlink()
        return False

    def add(self, batch: int, requests: Iterable[RequestRouting], meta: RoutingMeta) -> None:
        """Keep a finished batch."""
        write_routing(self._part(batch), meta, requests)

    def assemble(self, batches: int, meta: RoutingMeta) -> int:
        """Write the output of all batches in their order and remove the folder; the number of requests."""
        count = write_routing(self._output, meta, self._requests(batches, meta))
        shutil.rmtree(self.folder, ignore_errors=True)
        return count

    def _requests(self, batches: int, meta: RoutingMeta) -> Iterator[RequestRouting]:
        for batch in range(batches):
            part = RoutingFile(self._part(batch))
            for request in range(part.requests):
                yield part.recorded(request, meta.speculation)

    def _part(self, batch: int) -> Path:
        return self.folder / f"batch-{batch:06}.parquet"

    def _check_arguments(self) -> None:
        path = self.folder / _ARGUMENTS
        try:
            begun = msgspec.json.decode(path.read_bytes(), type=dict[str, str])
        except FileNotFoundError:
            self._write(path)
            return
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise TraceError(path, f"cannot be read ({error}).", remedy=f"Remove {self.folder}.") from None
        except OSError as error:
            raise unwritable(path, error) from None
        for name, value in self._arguments.items():
            if begun.get(name) != value:
                raise SettingError(
                    f"{self.folder} holds an unfinished recording with {name} {begun.get(name)}, this one "
                    f"has {value}. Give the same arguments or another --output, or remove that folder."
                )

    def _write(self, path: Path) -> None:
        try:
            with replacing(path) as partial:
                partial.write_bytes(msgspec.json.format(msgspec.json.encode(self._arguments), indent=2))
        except OSError as error:
            raise unwritable(path, error) from None
