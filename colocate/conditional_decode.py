"""The decode worker of conditional disaggregation: most prompts are handed over to it, some it computes itself.

It is a colocated worker in the role of decode. A request that comes with a peer receives its prompt in a room, as on
any decode worker; one without a peer has it computed here. Both wait in one queue for pages and run in one batch, and
from their second token on there is no difference between them.

What runs here is what the pool of decode workers is for, so prompts are held to a smaller budget: a step with running
requests has `disaggregation.step_tokens` tokens at most, of which prompts get what rows leave, and a page at least. How
many prompts come is the router's decision (`router.core.routing_policies`).
"""

from __future__ import annotations

from twinpool.colocate.step_budget import prompt_tokens
from twinpool.colocate.worker import ColocatedWorker
from twinpool.contracts.ids import Role


class ConditionalDecodeWorker(ColocatedWorker):
    """A decode worker that can compute prompts; see the module's prose. Implements
    `contracts.interfaces.worker_interface.Worker`."""

    role = Role.DECODE

    def _prompt_tokens_of_step(self, taken: int) -> int:
        chunk = self._config.prefill.chunk_tokens
        budget = min(chunk, self._config.disaggregation.step_tokens) if taken else chunk
        return prompt_tokens(budget, taken, 1, self._request_pages.page_tokens)
