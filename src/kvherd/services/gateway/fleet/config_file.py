"""The configuration file while the gateway runs: read again when it changes, and kept as it was when it is wrong.

A change counts once the file looks the same at two looks in a row, so that one which is being written is not taken
for one that says little.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from kvherd.core.errors import OptionInvalid
from kvherd.core.fleet.keyring import DataKey, key_digest
from kvherd.core.fleet.spec import ConfigInvalid
from kvherd.services.gateway.fleet.key_places import read_key, with_engine_keys
from kvherd.services.gateway.fleet.small_files import read_small
from kvherd.wire.gateway_toml import GatewayFile, KeyEntry, decode_gateway_file

log = logging.getLogger(__name__)

Apply = Callable[[GatewayFile, list[DataKey]], None]
"""Makes it so, all of it or nothing. Raises `OptionInvalid`."""

Prepare = Callable[[GatewayFile], None]
"""Called before that, off the event loop, for what takes a moment."""

_Look = tuple[tuple[int, int, int] | None, ...]
_LEAST_KEY: Final = 8


class ConfigFile:
    """An async context manager. Entering reads and applies the file, and raises `ConfigInvalid`.

    `problem` is what is wrong with the file as it stands now, empty if nothing is: the last good one holds meanwhile.
    """

    def __init__(
        self,
        path: Path,
        apply: Apply,
        environment: Mapping[str, str],
        *,
        prepare: Prepare = lambda _: None,
        period_s: float = 1.0,
    ) -> None:
        self.path = path
        self.problem = ""
        self.reads = 0
        self._apply = apply
        self._prepare = prepare
        self._environment = environment
        self._period_s = period_s
        self._secrets: tuple[Path, ...] = ()
        self._group = asyncio.TaskGroup()

    async def __aenter__(self) -> Self:
        self._read_at = await asyncio.to_thread(self._look)
        await self._read()
        await self._group.__aenter__()
        self._watching = self._group.create_task(self._watch())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watching.cancel()
        await self._group.__aexit__(None, None, None)

    async def _watch(self) -> None:
        before = self._read_at
        while True:
            await asyncio.sleep(self._period_s)
            now = await asyncio.to_thread(self._look)
            settled, before = now == before, now
            if not settled or now == self._read_at:
                continue
            self._read_at = now
            try:
                await self._read()
            except ConfigInvalid as error:
                self.problem = str(error)
                log.warning("the configuration stays as it was: %s", error)
            except Exception:  # a defect in reading must cost this change, and not the gateway
                self.problem = "an unforeseen error; the gateway's log has it"
                log.exception("reading %s failed unforeseen", self.path)
            else:
                self.problem = ""
                log.info("read %s again", self.path)

    async def _read(self) -> None:
        """Raises `ConfigInvalid`."""
        told, keys = await asyncio.to_thread(self._load)
        try:
            self._apply(told, keys)
        except OptionInvalid as error:
            raise ConfigInvalid(str(self.path), 0, str(error)) from None
        self.reads += 1

    def _load(self) -> tuple[GatewayFile, list[DataKey]]:
        try:
            data = read_small(self.path)
        except OSError as error:
            raise ConfigInvalid(str(self.path), 0, f"cannot be read: {error.strerror}") from None
        told = decode_gateway_file(data, str(self.path))
        places = (*(key.file for key in told.keys), *(one.engine_key_file for one in told.workers))
        self._secrets = tuple(Path(place) for place in places if place)
        try:
            told = replace(told, workers=with_engine_keys(told.workers, self._environment))
            keys = [DataKey(key.name, key_digest(self._secret(key)), key.limits, key.weight) for key in told.keys]
        except OptionInvalid as error:
            raise ConfigInvalid(str(self.path), 0, str(error)) from None
        twice = {key.digest for key in keys if sum(key.digest == one.digest for one in keys) > 1}
        if twice:
            names = ", ".join(key.name for key in keys if key.digest in twice)
            raise ConfigInvalid(str(self.path), 0, f"these keys are one and the same: {names}")
        self._prepare(told)
        return told, keys

    def _secret(self, key: KeyEntry) -> str:
        return read_key(f"key {key.name!r}", key.file, key.env, self._environment, least=_LEAST_KEY)

    def _look(self) -> _Look:
        return tuple(map(_signature, (self.path, *self._secrets)))


def _signature(path: Path) -> tuple[int, int, int] | None:
    try:
        seen = path.stat()
    except OSError:
        return None
    return seen.st_mtime_ns, seen.st_size, seen.st_ino
