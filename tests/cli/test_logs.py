"""The log of a process, and those who do not read it."""

import logging
import os

import pytest

from kvherd.cli.logs import LINE, MOST_WAITING_BYTES, LogLevel, UnwaitedLog, start_logging


def record(text: str) -> logging.LogRecord:
    return logging.LogRecord("kvherd.x", logging.INFO, "", 1, text, None, None)


def test_a_log_that_nobody_reads_loses_lines_and_says_so_when_there_is_room() -> None:
    reads, writes = os.pipe()
    handler = UnwaitedLog(writes)
    handler.setFormatter(logging.Formatter(LINE))
    count = 3 * MOST_WAITING_BYTES // 1024
    for _ in range(count):
        handler.emit(record("x" * 1024))
    lost = handler.lost
    assert 0 < lost < count
    got, os_read = b"", 65536
    while got.count(b"\n") < count - lost:
        got += os.read(reads, os_read)
        handler.flush()
    handler.emit(record("again"))
    told, last = os.read(reads, os_read).decode().splitlines()
    assert told == f"kvherd: nobody read this log; {lost} lines are lost"
    assert last.endswith("INFO kvherd.x: again")
    handler.emit(record("and again"))
    assert os.read(reads, os_read).count(b"\n") == 1
    os.close(reads)
    handler.emit(record("to nobody"))
    handler.flush()
    assert handler.lost == lost + 1
    os.close(writes)


def test_a_process_whose_standard_error_is_closed_logs_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(root, "level", root.level)
    monkeypatch.setattr("sys.stderr", None)
    handler = start_logging(LogLevel.INFO)
    logging.getLogger("kvherd.x").info("unheard")
    assert handler.lost == 0
