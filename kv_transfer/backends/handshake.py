"""The first words on a data connection, the same on every socket backend: who sends, what its KV looks like, yes or no.

    sender   -- magic, wire version, length, DataHello -->   receiver
             <-- length, DataWelcome (empty refusal: yes) --

Lengths are checked before memory is taken for them. Refusals name both values. What ucx says is the same two messages
in its own framing.
"""

from __future__ import annotations

import socket
import struct

from google.protobuf.message import DecodeError

from kv_transfer.backends.sockets import ConnectionLost, receive, send_pieces
from kv_transfer.layout import WIRE_VERSION, mismatch
from pdserve.v1 import kv_pb2

MAGIC = b"pdserve-kv"
GREETING = struct.Struct(f"!{len(MAGIC)}sHI")
"""Magic, wire version, length of the DataHello that follows."""
WELCOME = struct.Struct("!I")
MAX_HELLO_BYTES = 4096


def greet(connected: socket.socket, hello: kv_pb2.DataHello, deadline_s: float) -> None:
    """The sender's part. Raises ConnectionLost when it is not welcome."""
    data = hello.SerializeToString()
    send_pieces(connected, [GREETING.pack(MAGIC, WIRE_VERSION, len(data)), data], deadline_s)
    (length,) = WELCOME.unpack(receive(connected, WELCOME.size, deadline_s))
    if length > MAX_HELLO_BYTES:
        raise ConnectionLost("what listens there does not answer as a pdserve KV endpoint")
    check_welcome(receive(connected, length, deadline_s))


def check_welcome(data: bytes) -> None:
    try:
        welcome = kv_pb2.DataWelcome.FromString(data)
    except DecodeError as error:
        raise ConnectionLost(f"the welcome cannot be read: {error}") from error
    if welcome.refusal:
        raise ConnectionLost(f"refused: {welcome.refusal}")


def welcome(
    connected: socket.socket, me: kv_pb2.WorkerIdentity, layout: kv_pb2.KVLayout, deadline_s: float
) -> kv_pb2.WorkerIdentity:
    """The receiver's part; who sends. Raises ConnectionLost for a stranger and after a refusal."""
    magic, version, length = GREETING.unpack(receive(connected, GREETING.size, deadline_s))
    if magic != MAGIC or length > MAX_HELLO_BYTES:
        raise ConnectionLost("not a pdserve KV sender")
    hello = parse_hello(receive(connected, length, deadline_s))
    refused = refusal(version, hello, me, layout)
    answer = kv_pb2.DataWelcome(receiver=me, refusal=refused).SerializeToString()
    send_pieces(connected, [WELCOME.pack(len(answer)), answer], deadline_s)
    if refused:
        raise ConnectionLost(refused)
    return hello.sender


def parse_hello(data: bytes) -> kv_pb2.DataHello:
    try:
        return kv_pb2.DataHello.FromString(data)
    except DecodeError as error:
        raise ConnectionLost(f"the hello cannot be read: {error}") from error


def refusal(version: int, hello: kv_pb2.DataHello, me: kv_pb2.WorkerIdentity, layout: kv_pb2.KVLayout) -> str:
    """Why this sender may not send; empty when it may."""
    if version != WIRE_VERSION:
        return f"wire version: ours {WIRE_VERSION}, theirs {version}"
    if hello.receiver_incarnation != me.incarnation:
        return f"incarnation: ours {me.incarnation}, asked for {hello.receiver_incarnation}"
    return mismatch(layout, hello.layout) or ""
