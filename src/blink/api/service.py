# SPDX-License-Identifier: Apache-2.0
"""From a request to its response: read as its endpoint says, run by the engine, written as its endpoint says."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from fastapi import Request, Response

from blink.api.endpoint import Endpoint, Writing
from blink.api.http.bodies import Bodies, check_content_type
from blink.api.http.clients import flow_of, owner_of, salt_of
from blink.api.http.headers import header_of
from blink.api.http.http1 import find_writer, writer_of
from blink.api.reader import Reader
from blink.api.reading import LIGHT_BYTES
from blink.api.serving.adapters import ServedAdapters
from blink.api.serving.body import MAX_ID_CHARS
from blink.api.serving.message_constraint import constrain_message
from blink.api.serving.parsed_request import Bounds, ParsedRequest
from blink.api.serving.poller import Poller
from blink.api.serving.reply import Reply
from blink.api.serving.request_log import log_begin, log_end
from blink.api.serving.response_store import Keeper, StoreLimits, open_store
from blink.api.serving.search import BeamSession, check_search, write_beams
from blink.api.serving.session import Session
from blink.api.serving.stream import Encoder, EventStream, NonStreamingBody, NonStreamingResult
from blink.api.serving.timing import TimedStream
from blink.beam_search_params import BeamSearchParams
from blink.config import FrontendConfig
from blink.errors import (
    BadRequestError,
    BlinkError,
    ClientGoneError,
    ClientLimitError,
    EngineUnavailableError,
    NotFoundError,
    OverloadedError,
)
from blink.link.client import RegionInfo
from blink.request.beam_search import Tokens, scoring_params, search
from blink.request.compilation import Client, Compilation
from blink.request.planner import Plan, Planner
from blink.text.assets import ModelAssets
from blink.text.prompt import PromptRules

if TYPE_CHECKING:
    from blink.api.observe.tracing import RequestTracer

_REQUEST_ID = b"x-request-id"
_JSON = "application/json"
_REFUSALS: dict[type[BlinkError], str] = {
    OverloadedError: "queue_full",
    ClientLimitError: "client_limit",
    EngineUnavailableError: "engine_unavailable",
}
_REFUSED = tuple(_REFUSALS)


class ApiService:
    """Answer requests with one model. Owned by a worker; used from its event loop only."""

    def __init__(
        self,
        config: FrontendConfig,
        assets: ModelAssets,
        poller: Poller,
        tracer: RequestTracer | None = None,
        store_limits: StoreLimits | None = None,
    ) -> None:
        self.config = config
        self.assets = assets
        self.poller = poller
        self.tracer = tracer
        self.store_limits = store_limits
        self.compilation = Compilation()
        self.planner = Planner(assets, self.compilation)
        self.bodies = Bodies(config.max_bodies_bytes)
        self.reader = Reader(config, assets)
        self.adapters = ServedAdapters(config, poller.group.clients[0])
        self.is_draining = False
        self._bounds: dict[bytes, Bounds] = {}  # by the digest of an API key, for the adapters named next
        self._adapters_of_bounds: tuple[str, ...] = ()

    @property
    def engine(self) -> RegionInfo:
        """Return what the engine says about itself; raises as require_engine() does."""
        return self.require_engine()

    def require_engine(self) -> RegionInfo:
        """Return what the engine says about itself, for requests that need one now.

        Raises:
            EngineUnavailableError: it does not run, or this worker is shutting down.
        """
        if self.is_draining:
            raise EngineUnavailableError("The server is shutting down.")
        return self.poller.group.require_info()

    @property
    def model_name(self) -> str:
        """Return the name of the model that answers show."""
        return self.model_names[0]

    @property
    def model_names(self) -> tuple[str, ...]:
        """Return all names to which the model answers without an adapter."""
        return self.config.model.served_model_name or (self.engine.model,)

    @property
    def all_names(self) -> tuple[str, ...]:
        """Return these, and those of its adapters."""
        return (*self.model_names, *self.adapters.names)

    def find_root(self, name: str) -> tuple[str, str | None]:
        """Return where what answers to a name was read from, and the model that an adapter changes."""
        adapter = self.adapters.find(name)
        return (self.assets.root, None) if adapter is None else (adapter.path, adapter.parent or self.model_name)

    def render_metrics(self) -> bytes:
        """Return the metrics of this worker, of its engine and of its adapters."""
        metrics = self.poller.metrics
        return metrics.render() + self.adapters.render_gauge(f',model_name="{metrics.model_name}",engine="0"')

    @property
    def engine_stats(self) -> Mapping[str, int]:
        """Return the statistics of all engines together; nothing while there is no engine."""
        return self.poller.group.stats()

    def bounds_of(self, owner: bytes) -> Bounds:
        """Return what the bodies of a key's owner are measured by now."""
        engine = self.poller.group.info if not self.is_draining else None
        if self._adapters_of_bounds != (names := self.adapters.names):
            self._bounds.clear()
            self._adapters_of_bounds = names
        bounds = self._bounds.get(owner)
        if bounds is None or bounds.engine is not engine:
            bounds = self._bounds[owner] = self._make_bounds(owner, engine)
        return bounds

    def _make_bounds(self, owner: bytes, engine: RegionInfo | None) -> Bounds:
        names = self.config.model.served_model_name or ((engine.model,) if engine is not None else ())
        return Bounds(
            self.config.max_tokenize_chars,
            (*names, *self.adapters.names) if names else (),
            engine,
            may_choose_calls=self.config.enable_auto_tool_choice,
            shows_fields=self.config.enable_log_requests,
            names_token_ids=self.config.return_tokens_as_token_ids,
            always_has_usage=self.config.enable_force_include_usage,
            shows_times=self.config.enable_per_request_metrics,
            store=self.store_limits,
            owner=owner,
            is_hurried=True,
            trusts_templates=self.config.trust_request_chat_template,
        )

    def check_model(self, name: str | None) -> None:
        """Refuse requests for another model.

        Raises:
            NotFoundError: the model is not served here.
        """
        if name and name not in self.all_names:
            raise NotFoundError(f"The model `{name}` does not exist.", "model")

    async def answer(self, endpoint: Endpoint, request: Request) -> Response:
        """Return the response to a request of an endpoint.

        Raises:
            BlinkError: the request is refused or fails.
        """
        parsed = await self._read(endpoint.kind, request)
        if endpoint.writing is not None and not parsed.answer:
            return await self._generate(parsed, endpoint.writing, request)
        self.check_model(parsed.model)
        self.require_engine()
        parsed.check_engine()
        return Response(parsed.answer, media_type=_JSON)

    async def _read(self, kind: str, request: Request) -> ParsedRequest:
        """Take a request's body off its connection and read it."""
        check_content_type(request, self.config.allowed_origins)
        writer = find_writer(request.scope)
        bounds = self.bounds_of(owner_of(request.scope))
        small = writer.take_body(min(LIGHT_BYTES, self.config.max_body_bytes)) if writer is not None else None
        if small is not None:
            return await self.reader.read(kind, small, bounds)
        try:
            async with self.bodies.take(request) as data:
                return await self.reader.read(kind, data, bounds)
        except _REFUSED as error:
            self._count_refusal(error)
            raise

    def _count_refusal(self, error: BlinkError) -> None:
        self.poller.metrics.count_rejection(_REFUSALS[type(error)])

    async def _generate(self, parsed: ParsedRequest, writing: Writing, request: Request) -> Response:
        """Run a request and return its response, streamed or not."""
        tokenized = time.perf_counter()
        try:
            self.check_model(parsed.model)
            with writing.naming():
                session, reply_id = await self._plan(parsed, writing.id_prefix, request)
            open_reply = partial(self._open_reply, parsed, reply_id, owner_of(request.scope))
            if parsed.search is not None:
                body = writing.non_streaming(open_reply(), session)
                await self._search(parsed, parsed.search, session, body, request)
                return Response(body.encode(), media_type=_JSON)
            if parsed.runs_behind and (background := writing.background) is not None:
                return Response(session.start(lambda: background(open_reply(), session)).begun, media_type=_JSON)
            if parsed.stream and (stream := writing.stream) is not None:
                if self.config.enable_log_timings:
                    stamps = {"received": session.arrived, "parsed": parsed.parsed_at, "tokenized": tokenized}
                    return session.start(
                        lambda: _open_timed(stamps, stream(open_reply(), session), session, writing, reply_id)
                    )
                return session.start(lambda: EventStream(stream(open_reply(), session), session, writing.media_type))
            result = session.start(lambda: NonStreamingResult(writing.non_streaming(open_reply(), session)))
        except _REFUSED as error:
            self._count_refusal(error)
            raise
        await result.wait(session, request.scope)
        return Response(result.body.encode(), media_type=_JSON)

    async def _search(
        self,
        parsed: ParsedRequest,
        params: BeamSearchParams,
        session: Session,
        body: NonStreamingBody,
        request: Request,
    ) -> None:
        """Search for the answers of a request and put them into its sequences."""
        engine, asked = self.require_engine(), parsed.params
        check_search(params, len(session.prompts), engine)
        if asked.max_tokens is None:
            longest = max(prompt.num_tokens for prompt in session.prompts)
            params = replace(params, max_tokens=engine.max_model_len - longest)
        rules, client = (await self._prompt_rules(parsed, request))._replace(truncate=None), _client_of(request)
        scoring = scoring_params(params, asked)

        async def plan(sequences: list[Tokens]) -> Plan:
            return await self.planner.plan(sequences, scoring, rules, engine, client)

        steps = search([prompt.tokens for prompt in session.prompts], params, self.assets.eos_token_ids)
        beams = BeamSession(self.poller, session, params.beam_width * len(session.prompts))
        write_beams(await beams.run(steps, plan, request.scope), session, asked.logprobs or 0, body)

    async def _plan(self, parsed: ParsedRequest, id_prefix: str, request: Request) -> tuple[Session, str]:
        engine = self.require_engine()
        parsed.check_engine()
        client = _client_of(request)
        plan = await self._plan_sequences(parsed, engine, request, client)
        reply_id = id_prefix + _request_id(parsed, request)
        session = Session(self.poller, plan, writer_of(request.scope).received, client.flow)
        if self.config.enable_log_requests:
            log_begin(reply_id, session, parsed)
            session.on_end = partial(log_end, reply_id, session)
        if self.tracer is not None:
            self.tracer.begin(session, request.headers, reply_id, self.model_name, parsed.params)
        return session, reply_id

    async def _plan_sequences(
        self, parsed: ParsedRequest, engine: RegionInfo, request: Request, client: Client
    ) -> Plan:
        rules = await self._prompt_rules(parsed, request)
        params, form = parsed.params, parsed.reply.message
        use = parsed.tool_use if parsed.search is None else None  # a search is not constrained
        if form is None:
            return await self.planner.plan(parsed.prompts, params, rules, engine, client)
        constrained = constrain_message(params, use, form)
        try:
            return await self.planner.plan(parsed.prompts, constrained, rules, engine, client, form)
        except BadRequestError as error:
            if error.param != "structured_outputs" or use is None:
                raise
            if use.is_binding:
                raise BadRequestError(f"The tools' parameters cannot be kept to: {error.message}", "tools") from None
        # Calls of the model's own choice may be free, as on other servers, or give way to the form of the answer.
        return await self.planner.plan(
            parsed.prompts, constrain_message(params, None, form), rules, engine, client, form
        )

    async def _prompt_rules(self, parsed: ParsedRequest, request: Request) -> PromptRules:
        rules = parsed.rules
        if self.adapters.find(parsed.model) is not None:
            rules = await self.adapters.rules_of(parsed.model, rules)
        if self.config.prefix_cache_isolation != "key" or not owner_of(request.scope):
            return rules
        return rules._replace(cache_salt=salt_of(request.scope, rules.cache_salt))

    def _open_reply(self, parsed: ParsedRequest, reply_id: str, owner: bytes) -> Reply:
        reply = parsed.reply
        reply.id, reply.created = reply_id, int(time.time())
        reply.model = parsed.model if parsed.model and self.adapters.find(parsed.model) else self.model_name
        reply.tokenizer, reply.fingerprint = self.assets.tokenizer, self.poller.group.fingerprint
        if parsed.kept_input is not None and self.store_limits is not None:
            reply.keeper = Keeper(open_store(self.store_limits), owner, reply_id, parsed.kept_input)
        return reply


def _client_of(request: Request) -> Client:
    writer = writer_of(request.scope)
    return Client(flow_of(request.scope), lambda fail: writer.on_disconnect(lambda: fail(ClientGoneError())))


def _open_timed(
    stamps: dict[str, float], encoder: Encoder, session: Session, writing: Writing, reply_id: str
) -> TimedStream:
    stamps = {**stamps, "submitted": time.perf_counter()}
    return TimedStream(stamps, reply_id, encoder, session, writing.media_type)


def _request_id(parsed: ParsedRequest, request: Request) -> str:
    given = header_of(request.scope, _REQUEST_ID)
    if len(given) > MAX_ID_CHARS or not given.isprintable():
        raise BadRequestError(f"X-Request-Id must hold at most {MAX_ID_CHARS} printable characters.", "request_id")
    if parsed.kept_input is not None:  # who knows the id of a stored response may see it
        return secrets.token_hex(16)
    return given or parsed.request_id or secrets.token_hex(16)
