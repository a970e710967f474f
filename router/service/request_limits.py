"""What one request may ask for: its time, its first token's, and the tokens of its answers."""

from __future__ import annotations

import re

from twinpool.contracts.checkpoint.model_spec import ModelSpec
from twinpool.contracts.config.router_config import RouterConfig
from twinpool.contracts.errors import RequestError
from twinpool.contracts.ids import Role
from twinpool.router.openai.parse_request import GenerateRequest
from twinpool.router.state.worker_table import WorkerTable
from twinpool.router.tokenizer_pool.prepare_request import too_long

SLO_HEADER = "x-slo-ttft-ms"
"""The header by which a request names the milliseconds to its first token beyond which its answer is of no use."""
SESSION_HEADER = "x-session-id"
"""The header by which a request names its session."""
_MILLISECONDS = re.compile(r"0*[1-9][0-9]{0,8}", re.ASCII)


class RequestLimits:
    """The limits of one router's requests, by its configuration and by what its workers hold."""

    def __init__(self, spec: ModelSpec, config: RouterConfig, workers: WorkerTable) -> None:
        self._spec, self._config, self._workers = spec, config, workers

    def timeout_s(self, request: GenerateRequest) -> float:
        """Return the seconds from arrival to deadline. Raises `RequestError` above `router.max_timeout_s`."""
        if request.timeout_s is None:
            return self._config.request_timeout_s
        if request.timeout_s > self._config.max_timeout_s:
            raise RequestError(
                f"timeout {request.timeout_s:g} s is above the server's limit of {self._config.max_timeout_s:g} s",
                param="timeout",
            )
        return request.timeout_s

    def first_token_ms(self, header: str, tenants: int) -> int:
        """Return the milliseconds to the first token beyond which an answer is of no use; 0: none.

        `header`: what the client names, which may be less than its tenant's, `tenants`, or the server's. Raises
        `RequestError` where it is no such number.
        """
        given = tenants or self._config.ttft_slo_ms
        if not header:
            return given
        if not _MILLISECONDS.fullmatch(header):
            raise RequestError(f"the header {SLO_HEADER} must be a whole number of milliseconds, 1 or more")
        return min(int(header), given) if given else int(header)

    def answer_tokens(self, request: GenerateRequest, have: int) -> int:
        """Return the `max_tokens` of the answers to a prompt of `have` tokens. Raises `RequestError`, with the numbers,
        where prompt and answer can't fit into the context or into the workers' pools."""
        context = self._spec.context
        param = "messages" if request.chat else "prompt"
        wanted = 1 if request.max_tokens is None else request.max_tokens
        if have > context or (wanted and have >= context):
            raise too_long(have, context, param)
        if have + wanted > context:
            raise RequestError(
                f"prompt ({have} tokens) and max_tokens ({wanted}) make {have + wanted}; the context is {context}",
                param="max_tokens",
            )
        left = context - have
        for role in self._workers.roles:
            most = self._workers.max_positions(role)
            if most is None or (role is Role.DECODE and wanted <= 1 and request.max_tokens is not None):
                continue
            if have + wanted > most:
                raise RequestError(
                    f"prompt ({have} tokens) and answer ({wanted}) make {have + wanted}; "
                    f"the {role} workers' pools hold {most} positions",
                    param=param if have > most else "max_tokens",
                )
            left = min(left, most - have)
        if request.max_tokens is not None:
            return request.max_tokens
        if request.sampling.min_tokens > left:
            raise RequestError(
                f"min_tokens {request.sampling.min_tokens} is more than the {left} left", param="min_tokens"
            )
        if request.chat:
            return left
        return min(left, max(self._config.default_max_tokens, request.sampling.min_tokens))
