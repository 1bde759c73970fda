"""The circuit breaker on a clock of its own: whom it leaves out, for how long, and what it takes to come back."""

from __future__ import annotations

from pdserve.v1 import inference_pb2 as pb
from router import breaker
from router.breaker import FAILURES, FIRST_EJECTION_S, LONGEST_EJECTION_S, Breakers

A, B, A_AGAIN = ("a", 1), ("b", 1), ("a", 2)


class World:
    def __init__(self) -> None:
        self.now_s = 100.0
        self.ejections: list[str] = []
        self.breakers = Breakers(lambda: self.now_s, self.ejections.append)

    def ask(
        self,
        *keys: tuple[str, int],
        fails: tuple[tuple[str, int], ...] = (),
        code: pb.ErrorCode.ValueType = pb.ERROR_CODE_INTERNAL,
    ) -> None:
        begun_s = self.now_s
        self.breakers.sent(keys)
        self.now_s += 0.01
        self.breakers.ended(keys, fails, code, begun_s, has_tokens=not fails)


def test_it_takes_failures_in_a_row() -> None:
    world = World()
    for _ in range(3):
        for _ in range(FAILURES - 1):
            world.ask(A, fails=(A,))
        assert world.breakers.ejected() == set()
        world.ask(A, B)
    for _ in range(FAILURES):
        world.ask(A, B, fails=(A,))
    assert world.breakers.ejected() == {A}
    assert world.ejections == ["a"]
    assert A_AGAIN not in world.breakers.ejected()


def test_many_that_fail_together_count_once() -> None:
    world = World()
    for _ in range(10 * FAILURES):
        world.breakers.ended([A], [A], pb.ERROR_CODE_HANDOFF_FAILED, begun_s=world.now_s - 1, has_tokens=False)
    assert world.breakers.ejected() == set()


def test_a_full_or_lost_or_refusing_worker_is_not_ejected() -> None:
    world = World()
    for code in set(pb.ErrorCode.values()) - breaker.COUNTED:
        for _ in range(2 * FAILURES):
            world.ask(A, fails=(A,), code=code)
    assert world.breakers.ejected() == set()


def test_one_request_shows_whether_it_works_again_and_each_failure_doubles_the_wait() -> None:
    world = World()
    for _ in range(FAILURES):
        world.ask(A, fails=(A,))
    wait_s = FIRST_EJECTION_S
    for _ in range(12):
        world.now_s += 0.98 * wait_s - 0.01
        assert world.breakers.ejected() == {A}
        world.now_s += 0.05 * wait_s
        assert world.breakers.ejected() == set()
        world.breakers.sent([A])
        assert world.breakers.ejected() == {A}  # one is enough to see
        world.breakers.ended([A], [A], pb.ERROR_CODE_INTERNAL, world.now_s, has_tokens=False)
        wait_s = min(LONGEST_EJECTION_S, 2 * wait_s)
    world.now_s += wait_s
    world.breakers.sent([A])
    world.breakers.ended([A], [], pb.ERROR_CODE_UNSPECIFIED, world.now_s, has_tokens=False)  # the client went away
    assert world.breakers.ejected() == set()
    world.ask(A)
    assert world.breakers.num_open == 0
    for _ in range(FAILURES - 1):
        world.ask(A, fails=(A,))
    assert world.breakers.ejected() == set()  # forgiven


def test_two_that_were_ejected_together_are_not_tried_together() -> None:
    """Only B is bad; A was in every pair with it."""
    world = World()
    for _ in range(FAILURES):
        world.ask(A, B, fails=(A, B), code=pb.ERROR_CODE_HANDOFF_FAILED)
    assert world.breakers.ejected() == {A, B}
    world.now_s += FIRST_EJECTION_S
    (first,) = {A, B} - world.breakers.ejected()
    world.ask(first, ("c", 1))
    (second,) = {A, B} - world.breakers.ejected() - {first}
    world.ask(second, ("c", 1))
    assert world.breakers.num_open == 0


def test_workers_that_are_gone_do_not_stand_in_the_way_of_others() -> None:
    world = World()
    for key in (A, B):
        for _ in range(FAILURES):
            world.ask(key, fails=(key,))
    world.breakers.keep([B, A_AGAIN])
    assert world.breakers.num_open == 1
    world.now_s += FIRST_EJECTION_S
    assert world.breakers.ejected() == set()


def test_the_number_of_breakers_is_bounded() -> None:
    world = World()
    for i in range(breaker.MAX_WORKERS + 100):
        world.ask((f"w{i}", 1), fails=((f"w{i}", 1),))
    assert len(world.breakers._breakers) == breaker.MAX_WORKERS
