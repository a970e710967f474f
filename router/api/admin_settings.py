"""The operators' endpoint that changes the cluster's settings.

    POST /cluster/apply?dry_run=true      with JSON: sections of keys, as in a configuration file

The supervisor has the settings and decides; this router passes the change on by the controller. It answers with the
settings that were changed, or would be, each with the roles whose workers take it up when they start and the services
that are replaced for it; the digest of the settings that a worker of each role is started with from now on
(`/cluster/status` says which each was started with); and how many routers and controllers are behind.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from twinpool.contracts.errors import RequestError
from twinpool.contracts.messages.settings_change import MAX_SETTINGS_BYTES, SettingsAnswer, SettingsChange
from twinpool.contracts.outside_data import read_json
from twinpool.router.api.admin_drain import asked, conflict
from twinpool.router.api.admin_status import forbidden
from twinpool.router.api.asgi_exchange import HttpExchange
from twinpool.router.openai.api_errors import ApiError
from twinpool.router.service.router_service import RouterService

ANSWER_DEADLINE_S = 20.0
"""Seconds for the controller's answer, which has longer than the supervisor's to it."""


async def apply(service: RouterService, exchange: HttpExchange) -> None:
    """Change the settings that the body names, or with ``dry_run`` say what that would do. Answers 409 with the reason
    where nothing was changed."""
    if failure := forbidden(service, exchange):
        return await exchange.fail(failure)
    raw = await exchange.body(MAX_SETTINGS_BYTES, service.buffer)
    try:
        tree = read_json(raw)
    except ValueError as error:
        tree = error
    exchange.forget_body()
    if not isinstance(tree, dict):
        return await exchange.fail(
            ApiError(400, "the body must be JSON: an object of sections", "invalid_request_error", "invalid")
        )
    change = SettingsChange(json.dumps(tree), asked(exchange, "dry_run"))
    try:
        async with asyncio.timeout(ANSWER_DEADLINE_S):
            answer = await service.worker_links.directory.change_settings(change)
    except RequestError as error:
        return await exchange.fail(conflict(str(error)))
    except (OSError, TimeoutError) as error:
        reason = str(error) or "no answer in time"
        return await exchange.fail(ApiError(503, f"the controller can't be reached: {reason}", "server_error", "down"))
    await exchange.answer_json(200, _shown(answer))


def _shown(answer: SettingsAnswer) -> dict[str, Any]:
    changed = [
        {"key": one.key, "before": one.before, "after": one.after, "roles": list(one.roles), "by": one.by}
        for one in answer.changed
    ]
    digests = {str(role): digest for role, digest in answer.digests.items()}
    return {"changed": changed, "digests": digests, "behind": answer.behind, "trouble": answer.trouble}
