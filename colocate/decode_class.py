"""Which class a worker is of that generates answers: by its role, and whether it computes prompts as well."""

from __future__ import annotations

from twinpool.colocate.conditional_decode import ConditionalDecodeWorker
from twinpool.colocate.worker import ColocatedWorker
from twinpool.contracts.config.cluster_config import Config
from twinpool.contracts.ids import Role
from twinpool.decode.worker import DecodeWorker


def decode_class_for(role: Role, config: Config) -> type[DecodeWorker]:
    """Return the class of a decode or colocated worker."""
    if role is Role.COLOCATED:
        return ColocatedWorker
    return ConditionalDecodeWorker if config.conditional else DecodeWorker
