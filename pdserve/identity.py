"""Who a process is: an id that a person chose, and an incarnation that every start makes anew."""

from __future__ import annotations

import time

from pdserve.v1 import kv_pb2


def new_identity(role: str, worker_id: str, address: str = "") -> kv_pb2.WorkerIdentity:
    """An identity with a new incarnation: microseconds since 1970, so that a restart is always the newer one."""
    return kv_pb2.WorkerIdentity(worker_id=worker_id, incarnation=time.time_ns() // 1000, role=role, address=address)
