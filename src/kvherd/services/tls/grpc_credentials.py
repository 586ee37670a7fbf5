"""The certificates of a gRPC server, renewed with their files.

grpc tells no program how a handshake ended; a line of its own on standard error is all there is. That one has begun is
known by its asking for certificates, which each does once.
"""

import grpc

from kvherd.ports.tls import ServerTls
from kvherd.services.tls.handshakes import Handshakes


def server_credentials(tls: ServerTls, handshakes: Handshakes) -> grpc.ServerCredentials:
    """Every handshake gets the newest. Clients are asked for a certificate if there are authorities for them."""

    def newest() -> grpc.ServerCertificateConfiguration:
        pem = tls.pem()
        return grpc.ssl_server_certificate_configuration([(pem.key, pem.certificate)], pem.authorities)

    def asked() -> grpc.ServerCertificateConfiguration:
        handshakes.begin()
        return newest()

    return grpc.dynamic_ssl_server_credentials(newest(), asked, tls.pem().authorities is not None)
