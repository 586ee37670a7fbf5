"""What `relay.py` measures against each other: how each proxy is started, before which engines, on which core."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

SMG = shutil.which(os.environ.get("KVHERD_SMG", ".venv-smg/bin/smg"))


def pin(core: int) -> None:
    """The proxy has core 0, all else the others; no choice where there is one core."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) > 1:
        os.sched_setaffinity(0, {cores[0]} if core == 0 else set(cores[1:]))


@contextmanager
def process(arguments: list[str], *, core: int, stdout: int = subprocess.DEVNULL) -> Iterator[subprocess.Popen[str]]:
    """Run it within the block; its errors go to this process's own unless its output is not wanted either."""
    errors = subprocess.DEVNULL if stdout == subprocess.DEVNULL else None
    # A preexec_fn is unsafe among threads only, and this program has one.
    place = partial(pin, core)
    child = subprocess.Popen(arguments, text=True, stdout=stdout, stderr=errors, preexec_fn=place)  # noqa: PLW1509
    try:
        yield child
    finally:
        child.send_signal(signal.SIGINT if "nginx" not in arguments[0] else signal.SIGTERM)
        try:
            child.wait(5)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        if child.stdout is not None:
            child.stdout.close()


def nginx_conf(folder: Path, port: int, ports: list[int], *, processes: int = 1) -> str:
    engines = " ".join(f"server 127.0.0.1:{engine};" for engine in ports)
    return (
        f"worker_processes {processes}; daemon off; pid {folder}/pid; error_log {folder}/error.log;\n"
        f"events {{ worker_connections 4096; }}\nhttp {{ access_log off; keepalive_requests 1000000000;\n"
        f"client_body_temp_path {folder}/b; proxy_temp_path {folder}/p; fastcgi_temp_path {folder}/f;\n"
        f"uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s; client_body_buffer_size 64k;\n"
        f"upstream engines {{ {engines} keepalive 1024; keepalive_requests 1000000000; }}\n"
        f"server {{ listen 127.0.0.1:{port}; location / {{ proxy_pass http://engines; proxy_http_version 1.1;\n"
        f'proxy_set_header Connection ""; proxy_buffering off; }} }} }}\n'
    )


@contextmanager
def nginx(ports: list[int]) -> Iterator[tuple[int, int]]:
    """(pid, port) of an nginx with one worker process."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        conf = Path(folder, "nginx.conf")
        conf.write_text(nginx_conf(Path(folder), port, ports))
        with process(["nginx", "-p", folder, "-c", str(conf)], core=0) as child:
            wait_for_port(port)
            yield child.pid, port


def wait_for_port(port: int) -> None:
    end_s = time.monotonic() + 10
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            if time.monotonic() > end_s:
                raise
            time.sleep(0.02)
        else:
            return


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def gateway(ports: list[int]) -> Iterator[tuple[int, int]]:
    """(pid, port) of a whole kvherd gateway: JSON is read, workers are chosen, metrics counted."""
    command = [sys.executable, "-m", "kvherd.cli.main", "gateway", "--policy", "round_robin"]
    port = free_port()
    command += ["--port", str(port), "--grpc-port", str(free_port()), "--log-level", "warning"]
    for engine in ports:
        command += ["--worker", f"http://127.0.0.1:{engine}"]
    with process(command, core=0) as child:
        wait_until_ready(f"http://127.0.0.1:{port}/ready")
        yield child.pid, port


@contextmanager
def smg(ports: list[int]) -> Iterator[tuple[int, int]]:
    """(pid, port) of an SMG router."""
    port = free_port()
    command = [SMG or "", "launch", "--host", "127.0.0.1", "--port", str(port), "--policy", "round_robin"]
    command += ["--log-level", "warn", "--prometheus-port", str(free_port())]
    command += ["--worker-urls", *(f"http://127.0.0.1:{engine}" for engine in ports)]
    with process(command, core=0) as child:
        wait_until_ready(f"http://127.0.0.1:{port}/v1/models")
        yield child.pid, port


def wait_until_ready(url: str) -> None:
    end_s = time.monotonic() + 60
    while True:
        try:
            with urllib.request.urlopen(url, timeout=2) as answer:
                if answer.status == 200:
                    return
        except OSError:
            if time.monotonic() > end_s:
                raise
        time.sleep(0.1)
