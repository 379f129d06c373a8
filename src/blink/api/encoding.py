# SPDX-License-Identifier: Apache-2.0
"""Which encoder writes a response: completions and plain chats, chats that are read as messages, or /v1/responses."""

from __future__ import annotations

from blink.api.chunks import ChunkEncoder
from blink.api.message_chunks import MessageChunkEncoder
from blink.api.reply import Reply, WholeChoices
from blink.api.responses import ResponseEncoder, WholeResponse
from blink.api.session import Session
from blink.api.stream import Encoder, WholeBody
from blink.api.whole_messages import WholeMessages


def open_encoder(reply: Reply, session: Session) -> Encoder:
    """Return the encoder of a stream."""
    if reply.echo:
        return ResponseEncoder(reply, session)
    if reply.message is not None:
        return MessageChunkEncoder(reply, session, reply.message)
    return ChunkEncoder(reply, session)


def open_body(reply: Reply, session: Session) -> WholeBody:
    """Return what gathers the body of a response that is sent whole."""
    if reply.echo:
        return WholeResponse(reply, session)
    if reply.message is not None:
        return WholeMessages(reply, session, reply.message)
    return WholeChoices(reply, session)
