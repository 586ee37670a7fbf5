"""TLS handshakes of gRPC clients, for metrics: apart from `grpc_credentials`, which needs a large library."""

import threading


class Handshakes:
    """How many were begun; counted by threads of grpc's own."""

    def __init__(self) -> None:
        self.begun = 0
        self._lock = threading.Lock()

    def begin(self) -> None:
        with self._lock:
            self.begun += 1
