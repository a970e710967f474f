"""Pages that a peer may write are nobody else's to touch, from their grant until the peer writes them no more."""

from __future__ import annotations

import pytest

from tests.support.pool_sets import pool_sets
from tests.support.room_ends import Ends, ends
from twinpool.cache.device.adversarial_device import AdversarialDevice
from twinpool.cache.device.device_port import DEVICE, DeviceOp, DeviceStream, PageSpanUse, spans
from twinpool.cache.pool.page_allocator import Lease
from twinpool.contracts.errors import UnorderedAccess
from twinpool.transfer.rooms.room_states import PromptArrived

SPEC = pool_sets()["all"]


def touches(device: AdversarialDevice, leases: dict[str, Lease]) -> list[str]:
    """The pools in which these pages are a peer's: a read and a write of them are both refused."""
    found = []
    for pool, lease in leases.items():
        use = (PageSpanUse(DEVICE, pool, lease.indices),)
        refused = []
        for reads, writes in ((use, ()), ((), use)):
            try:
                device.touch("a local access", reads=reads, writes=writes)
            except UnorderedAccess as error:
                refused.append(str(error))
        assert len(refused) in (0, 2), refused
        found += [pool] if refused else []
    return found


@pytest.mark.parametrize("plane", ["shm", "zmq"])
def test_a5_a_local_access_to_granted_pages_is_refused_until_their_room_has_ended(plane: str) -> None:
    device = AdversarialDevice(1)
    with ends(SPEC, plane, reader_device=device) as both:
        prompt = both.prompt(27)
        leases = both.open(prompt)
        assert touches(device, leases) == [*leases]
        use = spans(DEVICE, {pool: lease.indices for pool, lease in leases.items()})
        with pytest.raises(UnorderedAccess, match=f"writes of prefill-0 to {prompt.room}"):
            device.submit(DeviceOp("forward", DeviceStream.COMPUTE, reads=use), lambda: None)
        both.sender.write(prompt.room, {"full": prompt.part("full")}, ())
        arrived(both, "full")
        assert touches(device, leases) == [pool for pool in leases if pool != "full"], "of these nothing has come"
        both.receiver.abort(prompt.room, "cancelled")
        both.until(lambda: not both.receiver.rooms, "the writer's word")
        device.settle()
        assert touches(device, leases) == []


def arrived(both: Ends, pool: str) -> None:
    (room,) = both.receiver_rooms.values()
    both.until(lambda: room.digests.get(pool), "the pages")


def test_a_room_that_is_complete_leaves_its_pages_to_its_request() -> None:
    device = AdversarialDevice(2)
    with ends(SPEC, "shm", reader_device=device) as both:
        prompt = both.prompt(27)
        leases = both.open(prompt)
        both.sender.write(prompt.room, prompt.all(), ())
        both.seal(prompt)
        complete = both.outcome(prompt.room)
        assert isinstance(complete, PromptArrived)
        device.settle()
        assert touches(device, leases) == []
        complete.release()
