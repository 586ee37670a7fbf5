"""The certificates of a gRPC server, renewed with their files."""

import grpc

from kvherd.ports.tls import ServerTls


def server_credentials(tls: ServerTls) -> grpc.ServerCredentials:
    """Every handshake gets the newest. Clients are asked for a certificate if there are authorities for them."""

    def newest() -> grpc.ServerCertificateConfiguration:
        pem = tls.pem()
        return grpc.ssl_server_certificate_configuration([(pem.key, pem.certificate)], pem.authorities)

    return grpc.dynamic_ssl_server_credentials(newest(), newest, tls.pem().authorities is not None)
