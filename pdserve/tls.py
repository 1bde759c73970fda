"""Mutual TLS between the processes of a cluster.

Owns one directory with this process's certificate and the authority that it trusts, in the file names under which
Kubernetes (cert-manager, or a secret of type ``kubernetes.io/tls``) mounts them::

    tls.crt   certificate chain, for the DNS name ``pdserve.internal``
    tls.key   its private key
    ca.crt    authorities whose certificates are believed

Both sides show a certificate. Workers are found by address, which may be a pod's of a minute ago, so a certificate
names the cluster (SERVER_NAME) and not the host. The files are read again for each new connection: a renewed
certificate needs no restart. Does not cover clients of the gateway, Redis (``rediss://``), or KV data, which carries
digests and no secrecy of its own.
"""

from __future__ import annotations

from pathlib import Path

import grpc

SERVER_NAME = "pdserve.internal"
CERTIFICATE, KEY, AUTHORITY = "tls.crt", "tls.key", "ca.crt"


class Tls:
    """Credentials from one directory."""

    def __init__(self, directory: str) -> None:
        """Raises ValueError when a file is missing."""
        self._directory = Path(directory)
        missing = [name for name in (CERTIFICATE, KEY, AUTHORITY) if not (self._directory / name).is_file()]
        if missing:
            raise ValueError(
                f"--tls-dir {directory} lacks {', '.join(missing)}: it must hold {CERTIFICATE}, {KEY} and {AUTHORITY}"
            )

    def channel_credentials(self) -> grpc.ChannelCredentials:
        authority, key, certificate = self._read()
        return grpc.ssl_channel_credentials(authority, key, certificate)

    def server_credentials(self) -> grpc.ServerCredentials:
        """Refuses clients without a certificate of the authority."""
        return grpc.dynamic_ssl_server_credentials(self._configuration(), self._configuration, True)

    def _configuration(self) -> grpc.ServerCertificateConfiguration:
        authority, key, certificate = self._read()
        return grpc.ssl_server_certificate_configuration([(key, certificate)], authority)

    def _read(self) -> tuple[bytes, bytes, bytes]:
        authority, key, certificate = ((self._directory / name).read_bytes() for name in (AUTHORITY, KEY, CERTIFICATE))
        return authority, key, certificate


def from_option(directory: str) -> Tls | None:
    """What ``--tls-dir`` says; empty: no TLS."""
    return Tls(directory) if directory else None
