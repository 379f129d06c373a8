# SPDX-License-Identifier: Apache-2.0
"""From a validated completion or chat request to its response."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING

from fastapi import Request, Response

from blink.api.endpoints import writing_of
from blink.api.http.bodies import Bodies, check_content_type
from blink.api.http.clients import flow_of, salt_of
from blink.api.http.http1 import find_writer, writer_of
from blink.api.openai.logprobs import LogprobFormat
from blink.api.openai.message_form import constrain_message, message_form
from blink.api.openai.reply import Reply
from blink.api.openai.sampling import build_sampling_params
from blink.api.openai.schema import MAX_ID_CHARS, ChatBody, CompletionBody
from blink.api.reader import Reader
from blink.api.reading import LIGHT_BYTES
from blink.api.serving.poller import Poller
from blink.api.serving.read import Bounds, Read
from blink.api.serving.session import Session
from blink.api.serving.stream import Encoder, EventStream, WholeResult
from blink.api.serving.timing import TimedStream
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
from blink.request.compilation import Client, Compilation
from blink.request.planner import Plan, Planner
from blink.sampling_params import SamplingParams
from blink.text.assets import ModelAssets
from blink.text.message.parser import MessageForm
from blink.text.prompt import PromptRules

if TYPE_CHECKING:
    from blink.api.observe.tracing import RequestTracer

REQUEST_ID_HEADER = "x-request-id"
_TEXT_FIELDS = {"prompt", "messages", "tools", "documents", "stop", "user", "cache_salt"}
_TEXT_FIELDS |= {"response_format", "structured_outputs"}
_REFUSALS: dict[type[BlinkError], str] = {
    OverloadedError: "queue_full",
    ClientLimitError: "client_limit",
    EngineUnavailableError: "engine_unavailable",
}

logger = logging.getLogger(__name__)


class CompletionService:
    """Answer requests with one model. Owned by a worker; used from its event loop only."""

    def __init__(
        self, config: FrontendConfig, assets: ModelAssets, poller: Poller, tracer: RequestTracer | None = None
    ) -> None:
        self.config = config
        self.assets = assets
        self.poller = poller
        self.tracer = tracer
        self.compilation = Compilation()
        self.planner = Planner(assets, self.compilation)
        self.bodies = Bodies(config.max_bodies_bytes)
        self.reader = Reader(config, assets)
        self.is_draining = False

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
        client = self.poller.client
        if not client.ready or client.info is None:
            raise EngineUnavailableError(f"Not available: {client.unavailable_reason}.")
        return client.info

    @property
    def model_name(self) -> str:
        """Return the name of the model in the API."""
        return self.config.model.served_model_name or self.engine.model

    @property
    def bounds(self) -> Bounds:
        """Return what bodies are measured by now."""
        client = self.poller.client
        engine = client.info if client.ready and not self.is_draining else None
        name = self.config.model.served_model_name or (engine.model if engine is not None else "")
        return Bounds(self.config.max_tokenize_chars, name, engine)

    def check_model(self, name: str | None) -> None:
        """Refuse requests for another model.

        Raises:
            NotFoundError: the model is not served here.
        """
        if name and name != self.model_name:
            raise NotFoundError(f"The model `{name}` does not exist.", "model")

    async def read(self, kind: str, request: Request) -> Read:
        """Take a request's body off its connection and read it.

        Raises:
            BlinkError: the request is refused.
        """
        check_content_type(request, self.config.allowed_origins)
        writer = find_writer(request.scope)
        small = writer.take_body(min(LIGHT_BYTES, self.config.max_body_bytes)) if writer is not None else None
        if small is not None:
            return await self.reader.read(kind, small, self.bounds)
        with self._counting_refusals():
            async with self.bodies.take(request) as data:
                return await self.reader.read(kind, data, self.bounds)

    @contextmanager
    def _counting_refusals(self) -> Iterator[None]:
        try:
            yield
        except (OverloadedError, ClientLimitError, EngineUnavailableError) as error:
            self.poller.metrics.count_rejection(_REFUSALS[type(error)])
            raise

    async def answer(self, read: Read, request: Request) -> Response:
        """Run a request and return its response, streamed or whole.

        Raises:
            BlinkError: the request is refused or fails.
        """
        tokenized = time.perf_counter()
        body: CompletionBody | ChatBody = read.body
        writing = writing_of(read.kind)
        with self._counting_refusals():
            self.check_model(body.model)
            with writing.naming():
                session, reply = await self._plan(read, request)
            if body.stream and self.config.enable_log_timings:
                stamps = {"received": session.arrived, "parsed": read.parsed, "tokenized": tokenized}
                return session.start(lambda: _open_timed(stamps, writing.stream, reply(), session))
            if body.stream:
                return session.start(lambda: EventStream(writing.stream(reply(), session), session))
            result = session.start(lambda: WholeResult(writing.whole(reply(), session)))
        await result.wait(session, request.scope)
        return Response(result.body.encode(), media_type="application/json")

    async def _plan(self, read: Read, request: Request) -> tuple[Session, Callable[[], Reply]]:
        engine, body = self.engine, read.body
        read.check_engine()
        params = build_sampling_params(body, self.assets.sampling_defaults)
        form = message_form(read, self.assets, may_choose=self.config.enable_auto_tool_choice)
        plan = await self._plan_sequences(read, params, form, engine, request)
        reply_id = _reply_id(read, request)
        if self.config.enable_log_requests:
            shown = body.model_dump(exclude=_TEXT_FIELDS, exclude_unset=True)
            logger.info("request %s: %d prompt tokens, %s", reply_id, sum(p.num_tokens for p in plan.prompts), shown)
        session = Session(self.poller, plan, writer_of(request.scope).received, flow_of(request.scope))
        if self.config.enable_log_requests:
            session.on_end = partial(_log_end, reply_id, session)
        if self.tracer is not None:
            self.tracer.begin(session, request.headers, reply_id, self.model_name, params)
        return session, partial(self._reply, read, params, form, reply_id)

    async def _plan_sequences(
        self, read: Read, params: SamplingParams, form: MessageForm | None, engine: RegionInfo, request: Request
    ) -> Plan:
        rules, client = self._prompt_rules(read.body, request), _client_of(request)
        if form is None:
            return await self.planner.plan(read.prompts, params, rules, engine, client)
        use = read.body.tool_use
        constrained = constrain_message(params, use, form)
        try:
            return await self.planner.plan(read.prompts, constrained, rules, engine, client, form)
        except BadRequestError as error:
            if error.param != "structured_outputs" or use is None:
                raise
            if use.is_binding:
                raise BadRequestError(f"The tools' parameters cannot be kept to: {error.message}", "tools") from None
        # Calls of the model's own choice may be free, as on other servers, or give way to the form of the answer.
        return await self.planner.plan(read.prompts, constrain_message(params, None, form), rules, engine, client, form)

    def _prompt_rules(self, body: CompletionBody | ChatBody, request: Request) -> PromptRules:
        rules = body.prompt_rules
        if self.config.prefix_cache_isolation != "key":
            return rules
        return replace(rules, cache_salt=salt_of(request.scope, body.cache_salt))

    def _reply(self, read: Read, params: SamplingParams, form: MessageForm | None, reply_id: str) -> Reply:
        body: CompletionBody | ChatBody = read.body
        is_chat = isinstance(body, ChatBody)
        options = body.stream_options
        logprobs = LogprobFormat(self.assets.tokenizer, as_token_ids=bool(body.return_tokens_as_token_ids))
        return Reply(
            id=reply_id,
            created=int(time.time()),
            model=self.model_name,
            is_chat=is_chat,
            role=read.role if is_chat and not body.add_generation_prompt else "assistant",
            num_choices=params.n,
            logprobs=None if params.logprobs is None else logprobs,
            prompt_logprobs=None if body.prompt_logprobs is None else logprobs,
            return_token_ids=bool(body.return_token_ids),
            include_usage=options is not None and options.include_usage,
            continuous_usage=options is not None and options.include_usage and options.continuous_usage_stats,
            echoes=read.echoes,
            message=form,
            echo=read.echo,
            temperature=params.temperature,
            top_p=params.top_p,
        )


def _client_of(request: Request) -> Client:
    writer = writer_of(request.scope)
    return Client(flow_of(request.scope), lambda fail: writer.on_disconnect(lambda: fail(ClientGoneError())))


def _log_end(reply_id: str, session: Session, error: BlinkError | None) -> None:
    """Write how a request ended; a client that left is no error."""
    if isinstance(error, ClientGoneError):
        error, status = None, ClientGoneError.status
    else:
        status = HTTPStatus.OK if error is None else error.status
    fields = {
        "request_id": reply_id,
        "seconds": round(time.perf_counter() - session.arrived, 6),
        "prompt_tokens": sum(prompt.num_tokens for prompt in session.prompts),
        "completion_tokens": sum(generation.num_tokens for generation in session.generations),
        "finish_reasons": [generation.finish_reason for generation in session.generations],
        "status": int(status),
        "error": error.message if error is not None else None,
    }
    text = "request {request_id} ended after {seconds:.3f} s: {prompt_tokens} prompt tokens, {completion_tokens} tokens"
    reasons = [generation.finish_reason or "abort" for generation in session.generations]
    how = error.message if error is not None else ", ".join(reasons)
    logger.info("%s: %s", text.format(**fields), how, extra={"fields": fields})


def _open_timed(
    stamps: dict[str, float], stream: Callable[[Reply, Session], Encoder], reply: Reply, session: Session
) -> TimedStream:
    stamps = {**stamps, "submitted": time.perf_counter()}
    return TimedStream(stamps, reply.id, stream(reply, session), session)


def _reply_id(read: Read, request: Request) -> str:
    given = request.headers.get(REQUEST_ID_HEADER, "")
    if len(given) > MAX_ID_CHARS or not given.isprintable():
        raise BadRequestError(f"X-Request-Id must hold at most {MAX_ID_CHARS} printable characters.", "request_id")
    return writing_of(read.kind).id_prefix + (given or read.body.request_id or secrets.token_hex(16))
