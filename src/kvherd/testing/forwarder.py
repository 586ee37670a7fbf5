"""A TCP port that passes on to another, until it is told not to."""

import socket
import threading
from contextlib import suppress
from types import TracebackType
from typing import Self

_PIECE_BYTES = 65_536


class Forwarder:
    """A context manager; `port` is where it listens. It works in threads of its own, all gone when it is left.

    `cut` breaks every connection, and every new one at once; `freeze` keeps them and passes nothing on, as a cable does
    that was pulled out. `mend` ends both.
    """

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._is_cut = False
        self._flowing = threading.Event()
        self._flowing.set()
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> Self:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._accepting = threading.Thread(target=self._accept)
        self._accepting.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._accepting.join()
        self._listener.close()
        self.cut()
        self._flowing.set()
        for thread in self._threads:
            thread.join()

    def cut(self) -> None:
        with self._lock:
            self._is_cut = True
            for one in self._open:
                _hang_up(one)

    def freeze(self) -> None:
        self._flowing.clear()

    def mend(self) -> None:
        self._is_cut = False
        self._flowing.set()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                thread = threading.Thread(target=self._serve, args=(near,))
                self._threads.append(thread)
                thread.start()

    def _serve(self, near: socket.socket) -> None:
        with near, suppress(OSError), socket.create_connection(("127.0.0.1", self._target_port)) as far:
            with self._lock:
                if self._is_cut:
                    return
                self._open |= {near, far}
            back = threading.Thread(target=self._pass, args=(far, near))
            back.start()
            self._pass(near, far)
            back.join()
            with self._lock:
                self._open -= {near, far}

    def _pass(self, source: socket.socket, sink: socket.socket) -> None:
        """Until either end is gone; then the other one's end is gone too."""
        with suppress(OSError):
            while data := source.recv(_PIECE_BYTES):
                self._flowing.wait()
                sink.sendall(data)
        _hang_up(source)
        _hang_up(sink)


def _hang_up(one: socket.socket) -> None:
    with suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
