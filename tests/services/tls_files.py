"""Certificates for tests: an authority of their own, and the directory that ``--tls-dir`` wants."""

from __future__ import annotations

from pathlib import Path

import trustme

from pdserve.tls import AUTHORITY, CERTIFICATE, KEY, SERVER_NAME


def write_tls_dir(directory: Path, authority: trustme.CA, name: str = SERVER_NAME) -> str:
    """A certificate for ``name`` in ``directory``, as cert-manager would mount it."""
    directory.mkdir(exist_ok=True)
    certificate = authority.issue_cert(name)
    certificate.private_key_pem.write_to_path(directory / KEY)
    chain = directory / CERTIFICATE
    chain.unlink(missing_ok=True)
    for blob in certificate.cert_chain_pems:
        blob.write_to_path(chain, append=True)
    authority.cert_pem.write_to_path(directory / AUTHORITY)
    return str(directory)
