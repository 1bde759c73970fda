"""Mutual TLS between processes: who gets in, who does not, and renewal without a restart."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
import pytest_asyncio
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pdserve.channel import open_channel, serve
from pdserve.identity import new_identity
from pdserve.session import Session
from pdserve.session_server import SessionServer
from pdserve.tls import AUTHORITY, CERTIFICATE, KEY, Tls
from pdserve.v1 import inference_pb2 as pb
from pdserve.v1 import worker_pb2_grpc
from tests.services.gateway_harness import FakeRouter, Script
from tests.services.tls_files import write_tls_dir


class World:
    """A server with TLS, and the authority that it believes."""

    def __init__(self, directory: Path) -> None:
        self.authority = trustme.CA()
        self.directory = directory / "server"
        self.tls = Tls(write_tls_dir(self.directory, self.authority))
        self.address = ""


@pytest_asyncio.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    world = World(tmp_path)
    server, port = await serve([worker_pb2_grpc.KVHandoffServicer()], "127.0.0.1", 0, tls=world.tls)
    world.address = f"127.0.0.1:{port}"
    yield world
    await server.stop(None)


async def _ask(address: str, tls: Tls | None) -> grpc.StatusCode:
    async with open_channel(address, tls) as channel:
        try:
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
        except grpc.aio.AioRpcError as error:
            return error.code()
    return grpc.StatusCode.OK


async def test_a_member_of_the_cluster_gets_in(world: World, tmp_path: Path) -> None:
    member = Tls(write_tls_dir(tmp_path / "member", world.authority))
    assert await _ask(world.address, member) is grpc.StatusCode.OK


async def test_without_a_certificate_nobody_gets_in(world: World) -> None:
    assert await _ask(world.address, None) is grpc.StatusCode.UNAVAILABLE
    credentials = grpc.ssl_channel_credentials((world.directory / AUTHORITY).read_bytes())
    options = [("grpc.ssl_target_name_override", "pdserve.internal")]
    async with grpc.aio.secure_channel(world.address, credentials, options=options) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_another_authority_is_not_believed_by_either_side(world: World, tmp_path: Path) -> None:
    stranger = trustme.CA()
    theirs = tmp_path / "stranger"
    write_tls_dir(theirs, stranger)
    assert await _ask(world.address, Tls(str(theirs))) is grpc.StatusCode.UNAVAILABLE  # does not believe the server
    world.authority.cert_pem.write_to_path(theirs / AUTHORITY)
    assert await _ask(world.address, Tls(str(theirs))) is grpc.StatusCode.UNAVAILABLE  # is not believed by it


async def test_a_server_of_another_name_is_not_believed(world: World, tmp_path: Path) -> None:
    impostor = Tls(write_tls_dir(tmp_path / "impostor", world.authority, "somebody.else"))
    server, port = await serve([worker_pb2_grpc.KVHandoffServicer()], "127.0.0.1", 0, tls=impostor)
    assert await _ask(f"127.0.0.1:{port}", world.tls) is grpc.StatusCode.UNAVAILABLE
    await server.stop(None)


async def test_renewed_files_serve_new_connections_without_a_restart(world: World, tmp_path: Path) -> None:
    renewed = trustme.CA()
    member = Tls(write_tls_dir(tmp_path / "member", renewed))
    assert await _ask(world.address, member) is grpc.StatusCode.UNAVAILABLE
    write_tls_dir(world.directory, renewed)
    assert await _ask(world.address, member) is grpc.StatusCode.OK


async def test_a_session_without_tls_to_a_server_with_it_never_lives(world: World) -> None:
    with pytest.raises(ConnectionError):
        await Session.connect(world.address, new_identity("gateway", "g"), timeout_s=1.0)


@pytest.mark.parametrize("lacking", [CERTIFICATE, KEY, AUTHORITY])
def test_a_missing_file_is_named(tmp_path: Path, lacking: str) -> None:
    directory = write_tls_dir(tmp_path / "tls", trustme.CA())
    (tmp_path / "tls" / lacking).unlink()
    with pytest.raises(ValueError, match=f"lacks {lacking}: it must hold"):
        Tls(directory)


async def test_a_session_outlives_a_moment_without_its_certificate(tmp_path: Path) -> None:
    """Files are not always replaced in one step."""
    authority, directory = trustme.CA(), tmp_path / "member"
    member = Tls(write_tls_dir(directory, authority))
    servicer = SessionServer(new_identity("router", "r"), FakeRouter(lambda _: Script([])), load=pb.Load)
    server, port = await serve([servicer], "127.0.0.1", 0, tls=Tls(write_tls_dir(tmp_path / "server", authority)))
    (directory / KEY).unlink()
    session = Session.start(f"127.0.0.1:{port}", new_identity("gateway", "g"), tls=member)
    assert not await session.wait_alive(0.3)
    write_tls_dir(directory, authority)
    assert await session.wait_alive(10.0)
    await session.close()
    await servicer.close()
    await server.stop(None)
