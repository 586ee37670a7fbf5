"""A person's or a script's way to a gateway: one request, one JSON answer, one deadline."""

import http.client
import json
import os
import ssl
import sys
from dataclasses import dataclass
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer

from kvherd.core.errors import GatewayUnreachable, OptionInvalid

ADMIN_KEY = "KVHERD_ADMIN_KEY"
CLIENT_CERT = "KVHERD_CLIENT_CERT"
GatewayOption = Annotated[
    str, typer.Option("--gateway", envvar="KVHERD_GATEWAY", metavar="URL", help="The gateway to ask.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the gateway's answer as JSON, for programs.")]
AdminKeyOption = Annotated[
    str | None, typer.Option(envvar=ADMIN_KEY, metavar="KEY", help="The key that operators' routes want.")
]
DEFAULT_GATEWAY = "http://127.0.0.1:8080"


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    body: bytes


def ask(
    method: str, base_url: str, path: str, *, timeout_s: float, admin_key: str | None = None, body: bytes = b""
) -> Answer:
    """Raises `GatewayUnreachable` if no HTTP answer comes; no socket operation takes longer than `timeout_s`."""
    url = urlsplit(base_url)
    if url.scheme not in ("http", "https") or not url.hostname:
        raise OptionInvalid("--gateway", f"{base_url!r} is not of the form http://HOST:PORT or https://HOST:PORT")
    connection = _connection(url.scheme, url.hostname, url.port, timeout_s)
    try:
        headers = {"Authorization": f"Bearer {admin_key}"} if admin_key else {}
        connection.request(method, url.path.rstrip("/") + path, body=body or None, headers=headers)
        response = connection.getresponse()
        return Answer(response.status, response.read())
    except TimeoutError as error:
        raise GatewayUnreachable(base_url, f"no answer within {timeout_s:g} s") from error
    except ssl.SSLCertVerificationError as error:
        trusted = f"{error.verify_message.rstrip('.')} (SSL_CERT_FILE names whom to trust)"
        raise GatewayUnreachable(base_url, f"its certificate is not trusted: {trusted}") from error
    except (OSError, http.client.HTTPException) as error:
        raise GatewayUnreachable(base_url, getattr(error, "strerror", None) or repr(error)) from error
    finally:
        connection.close()


def _connection(scheme: str, host: str, port: int | None, timeout_s: float) -> http.client.HTTPConnection:
    """Trusts whom this machine trusts, or SSL_CERT_FILE; shows the certificate of KVHERD_CLIENT_CERT."""
    if scheme == "http":
        return http.client.HTTPConnection(host, port or 80, timeout=timeout_s)
    context = ssl.create_default_context()
    own = os.environ.get(CLIENT_CERT)
    if own:
        try:
            context.load_cert_chain(own, password=lambda: "")
        except (OSError, ValueError) as error:
            raise OptionInvalid(CLIENT_CERT, f"{own} does not hold a certificate and its key: {error}") from None
    return http.client.HTTPSConnection(host, port or 443, timeout=timeout_s, context=context)


def ask_json(
    method: str, base_url: str, path: str, *, timeout_s: float, admin_key: str | None, body: bytes = b""
) -> tuple[int, dict[str, Any]]:
    """The status and the JSON object a gateway answered.

    Anything else is not a gateway: `GatewayUnreachable`. An error that it answers is told, and ends the command with 1.
    """
    answer = ask(method, base_url, path, timeout_s=timeout_s, admin_key=admin_key, body=body)
    try:
        decoded = json.loads(answer.body)
    except ValueError:
        decoded = None
    if not isinstance(decoded, dict):
        raise GatewayUnreachable(base_url, f"what answers there with status {answer.status} is not a kvherd gateway")
    if isinstance(decoded.get("error"), dict):
        print(f"kvherd: {decoded['error'].get('message')}", file=sys.stderr)
        raise typer.Exit(1)
    return answer.status, decoded
