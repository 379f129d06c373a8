# SPDX-License-Identifier: Apache-2.0
"""The endpoints that take a body: one row each, which routes, readers, answers and the documentation follow."""

from __future__ import annotations

from itertools import chain

from blink.api.anthropic.errors import naming_origins as naming_message_origins
from blink.api.anthropic.errors import write_error
from blink.api.anthropic.read import answer_count_tokens, read_messages
from blink.api.anthropic.schema import CountTokensBody, MessagesBody
from blink.api.anthropic.write import ID_PREFIX, MessageEncoder, MessageObject
from blink.api.endpoint import Endpoint, Writing
from blink.api.http.errors import ErrorWriter, error_json
from blink.api.llama_cpp.errors import naming_origins as naming_llama_cpp_origins
from blink.api.llama_cpp.errors import write_error as write_llama_cpp_error
from blink.api.llama_cpp.read import answer_apply_template, read_llama_cpp_completion
from blink.api.llama_cpp.schema import ApplyTemplateBody, InfillBody, LlamaCppCompletionBody
from blink.api.llama_cpp.write import LlamaCppAnswer, LlamaCppEvents
from blink.api.ollama.errors import naming_origins as naming_ollama_origins
from blink.api.ollama.errors import write_error as write_ollama_error
from blink.api.ollama.read import answer_show, read_generate, read_ollama_chat
from blink.api.ollama.schema import GenerateBody, OllamaChatBody, ShowBody
from blink.api.ollama.write import LINES, OllamaAnswer, OllamaLines
from blink.api.openai.batch import BatchChatBody, read_batch
from blink.api.openai.invocations import InvocationBody, read_invocation
from blink.api.openai.message_chunks import open_stream
from blink.api.openai.non_streaming_messages import open_non_streaming
from blink.api.openai.pooling.read import read_embeddings, read_rerank, read_score
from blink.api.openai.pooling.schema import EmbeddingBody, RerankBody, ScoreBody
from blink.api.openai.pooling.write import VectorsObject
from blink.api.openai.read import read_chat, read_completion
from blink.api.openai.render import answer_render_chat, answer_render_completion
from blink.api.openai.responses.background import BackgroundResponse
from blink.api.openai.responses.read import answer_input_tokens, read_responses
from blink.api.openai.responses.schema import InputTokensBody, ResponsesBody, naming_origins
from blink.api.openai.responses.write import ResponseEncoder, ResponseObject
from blink.api.openai.schema import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from blink.api.openai.tokens import answer_detokenize, answer_tokenize
from blink.region.layout import Task

_OLLAMA_WRITING = Writing(
    id_prefix="ollama-",
    stream=OllamaLines,
    non_streaming=OllamaAnswer,
    naming=naming_ollama_origins,
    media_type=LINES,
)
_LLAMA_CPP_WRITING = Writing(
    id_prefix="cmpl-", stream=LlamaCppEvents, non_streaming=LlamaCppAnswer, naming=naming_llama_cpp_origins
)

_ALL = (
    Endpoint(
        kind="completions",
        path="/v1/completions",
        name="complete",
        summary="Continue prompts.",
        body=CompletionBody,
        main_field="prompt",
        read=read_completion,
        writing=Writing(id_prefix="cmpl-", stream=open_stream, non_streaming=open_non_streaming),
        aliases=("/completions",),
    ),
    Endpoint(
        kind="chat",
        path="/v1/chat/completions",
        name="chat",
        summary="Answer a conversation.",
        body=ChatBody,
        main_field="messages",
        read=read_chat,
        writing=Writing(id_prefix="chatcmpl-", stream=open_stream, non_streaming=open_non_streaming),
        aliases=("/chat/completions",),
    ),
    Endpoint(
        kind="chat_batch",
        path="/v1/chat/completions/batch",
        name="chat_batch",
        summary="Answer several conversations: a choice for each.",
        body=BatchChatBody,
        main_field="messages",
        read=read_batch,
        writing=Writing(id_prefix="chatcmpl-", stream=open_stream, non_streaming=open_non_streaming),
    ),
    Endpoint(
        kind="render_chat",
        path="/v1/chat/completions/render",
        name="render_chat",
        summary="Return the prompt of a conversation as tokens, with the parameters of sampling.",
        body=ChatBody,
        main_field="messages",
        read=answer_render_chat,
    ),
    Endpoint(
        kind="render_completion",
        path="/v1/completions/render",
        name="render_completion",
        summary="Return the prompts of a completion as tokens, with the parameters of sampling.",
        body=CompletionBody,
        main_field="prompt",
        read=answer_render_completion,
    ),
    Endpoint(
        kind="invocations",
        path="/invocations",
        name="invoke",
        summary="Answer a conversation if the body has messages, else continue a prompt: SageMaker's path.",
        body=InvocationBody,
        main_field=None,
        read=read_invocation,
        writing=Writing(id_prefix="inv-", stream=open_stream, non_streaming=open_non_streaming),
    ),
    Endpoint(
        kind="responses",
        path="/v1/responses",
        name="respond",
        summary="Answer a conversation, in the form of OpenAI's newer API.",
        body=ResponsesBody,
        main_field="input",
        read=read_responses,
        writing=Writing(
            id_prefix="resp_",
            stream=ResponseEncoder,
            non_streaming=ResponseObject,
            naming=naming_origins,
            background=BackgroundResponse,
        ),
        aliases=("/responses",),
    ),
    Endpoint(
        kind="input_tokens",
        path="/v1/responses/input_tokens",
        name="count_input_tokens",
        summary="Return the number of tokens that the conversation of a response has.",
        body=InputTokensBody,
        main_field="input",
        read=answer_input_tokens,
    ),
    Endpoint(
        kind="embeddings",
        path="/v1/embeddings",
        name="embed",
        summary="Return the embeddings of texts.",
        body=EmbeddingBody,
        main_field="input",
        read=read_embeddings,
        writing=Writing(id_prefix="embd-", non_streaming=VectorsObject, task=Task.EMBED),
        aliases=("/embeddings",),
    ),
    Endpoint(
        kind="rerank",
        path="/v1/rerank",
        name="rerank",
        summary="Rank documents by what they say to a query, in the form of Jina's and Cohere's APIs.",
        body=RerankBody,
        main_field="documents",
        read=read_rerank,
        writing=Writing(id_prefix="rerank-", non_streaming=VectorsObject, task=Task.SCORE),
        aliases=("/rerank", "/v2/rerank"),
    ),
    Endpoint(
        kind="score",
        path="/v1/score",
        name="score",
        summary="Score pairs of texts.",
        body=ScoreBody,
        main_field="text_2",
        read=read_score,
        writing=Writing(id_prefix="score-", non_streaming=VectorsObject, task=Task.SCORE),
        aliases=("/score",),
    ),
    Endpoint(
        kind="messages",
        path="/v1/messages",
        name="message",
        summary="Answer a conversation, in the form of Anthropic's API.",
        body=MessagesBody,
        main_field="messages",
        read=read_messages,
        writing=Writing(
            id_prefix=ID_PREFIX, stream=MessageEncoder, non_streaming=MessageObject, naming=naming_message_origins
        ),
        error_body=write_error,
    ),
    Endpoint(
        kind="count_tokens",
        path="/v1/messages/count_tokens",
        name="count_tokens",
        summary="Return the number of tokens of a conversation, in the form of Anthropic's API.",
        body=CountTokensBody,
        main_field="messages",
        read=answer_count_tokens,
        error_body=write_error,
    ),
    Endpoint(
        kind="ollama_chat",
        path="/api/chat",
        name="ollama_chat",
        summary="Answer a conversation, in the form of Ollama's API.",
        body=OllamaChatBody,
        main_field="messages",
        read=read_ollama_chat,
        writing=_OLLAMA_WRITING,
        error_body=write_ollama_error,
    ),
    Endpoint(
        kind="ollama_generate",
        path="/api/generate",
        name="ollama_generate",
        summary="Answer a prompt, in the form of Ollama's API.",
        body=GenerateBody,
        main_field="prompt",
        read=read_generate,
        writing=_OLLAMA_WRITING,
        error_body=write_ollama_error,
    ),
    Endpoint(
        kind="ollama_show",
        path="/api/show",
        name="ollama_show",
        summary="Describe the model, in the form of Ollama's API.",
        body=ShowBody,
        main_field=None,
        read=answer_show,
        error_body=write_ollama_error,
    ),
    Endpoint(
        kind="llama_completion",
        path="/completion",
        name="llama_complete",
        summary="Continue a prompt, in the form of llama.cpp's API.",
        body=LlamaCppCompletionBody,
        main_field="prompt",
        read=read_llama_cpp_completion,
        writing=_LLAMA_CPP_WRITING,
        error_body=write_llama_cpp_error,
    ),
    Endpoint(
        kind="llama_infill",
        path="/infill",
        name="llama_infill",
        summary="Write what is missing between two texts, in the form of llama.cpp's API.",
        body=InfillBody,
        main_field="input_prefix",
        read=read_llama_cpp_completion,
        writing=_LLAMA_CPP_WRITING,
        error_body=write_llama_cpp_error,
    ),
    Endpoint(
        kind="llama_template",
        path="/apply-template",
        name="llama_template",
        summary="Return the prompt of a conversation, in the form of llama.cpp's API.",
        body=ApplyTemplateBody,
        main_field="messages",
        read=answer_apply_template,
        error_body=write_llama_cpp_error,
    ),
    Endpoint(
        kind="tokenize",
        path="/tokenize",
        name="tokenize",
        summary="Return the token ids of a text or a conversation.",
        body=TokenizeBody,
        main_field=None,
        read=answer_tokenize,
    ),
    Endpoint(
        kind="detokenize",
        path="/detokenize",
        name="detokenize",
        summary="Return the text of token ids.",
        body=DetokenizeBody,
        main_field="tokens",
        read=answer_detokenize,
    ),
)
ENDPOINTS = {endpoint.kind: endpoint for endpoint in _ALL}
# What needs an API key beside the endpoints that generate: paths that begin so ask for work, cost others, or tell of
# the server's files.
_GUARDED = ("/v1", "/models", "/api/", "/apply-template", "/props", "/reset_prefix_cache", "/server_info")
# Paths without a row whose errors have a form of their own, with all below them.
_OTHER_FORMS = {"/api": write_ollama_error, "/props": write_llama_cpp_error, "/slots": write_llama_cpp_error}


def guarded_paths() -> tuple[str, ...]:
    """Return the beginnings of all paths that need an API key where the server has one."""
    generating = (endpoint.paths for endpoint in ENDPOINTS.values() if endpoint.writing is not None)
    return (*_GUARDED, *chain.from_iterable(generating))


def error_writer_of(path: str) -> ErrorWriter:
    """Return what writes the errors of a path that may be an endpoint's, below one, or nobody's."""
    for endpoint in ENDPOINTS.values():
        if endpoint.error_body is not error_json and f"{path}/".startswith(f"{endpoint.path}/"):
            return endpoint.error_body
    forms = (write for place, write in _OTHER_FORMS.items() if f"{path}/".startswith(f"{place}/"))
    return next(forms, error_json)
