# SPDX-License-Identifier: Apache-2.0
"""The request bodies of the API: OpenAI's and vLLM's fields with vLLM's defaults. Unknown fields are ignored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    PrivateAttr,
    StrictBool,
    StrictInt,
    Tag,
    model_validator,
)

from blink.api.openai.field_checks import check_lengths, check_printable
from blink.api.openai.functions import with_tools
from blink.api.openai.prediction import PredictionBody
from blink.api.openai.structured import ResponseFormat, StructuredOutputsBody
from blink.api.openai.tools import check_tool_fields, read_tool_use
from blink.api.openai.unsupported import reject_unsupported
from blink.api.serving.body import MAX_ID_CHARS, Body
from blink.errors import BadRequestError
from blink.request.rendering import Rendering
from blink.text.message.tool_use import ToolUse
from blink.text.prompt import PromptRules
from blink.text.template import ChatTemplate

# The first wrong item ends the check: a list of a million of them would take minutes and gigabytes.
TokenIds = Annotated[list[StrictInt], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]
Message = dict[str, Any]


class StreamOptions(BaseModel):
    """What a stream tells beside its text."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class GenerationBody(Body):
    """The fields that completions and chat share; None means "the model's default"."""

    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = 0.0
    frequency_penalty: float | None = 0.0
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | Texts | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: TokenIds | None = None
    bad_words: Texts | None = None
    thinking_token_budget: int | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None
    truncation_side: Literal["left", "right"] | None = None
    priority: int = 0
    service_tier: str | None = None
    tpot_target_ms: float | None = None
    request_id: Annotated[str, Field(min_length=1, max_length=MAX_ID_CHARS), AfterValidator(check_printable)] | None = (
        None
    )
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: TokenIds | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputsBody | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    vllm_xargs: dict[str, Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def _reject_unsupported(cls, fields: Any) -> Any:
        if isinstance(fields, dict):
            reject_unsupported(fields)
            check_lengths(fields)
        return fields

    @property
    def prompt_logprobs_count(self) -> int | None:
        """Return how many logprobs per prompt token are asked for, None for no logprobs."""
        return self.prompt_logprobs

    def _prompt_rules(self, param: str, *, add_special_tokens: bool) -> PromptRules:
        return PromptRules(
            add_special_tokens=add_special_tokens,
            truncate=self.truncate_prompt_tokens,
            truncate_right=self.truncation_side == "right",
            cache_salt=self.cache_salt,
            param=param,
        )

    @model_validator(mode="after")
    def _check_fields(self) -> GenerationBody:
        if self.prompt_logprobs_count is not None and self.stream:
            raise BadRequestError("Logprobs of the prompt are not available when `stream=True`.", "stream")
        if self.stream_options is not None and not self.stream:
            raise BadRequestError("Stream options can only be defined when `stream=True`.", "stream_options")
        if self.structured_outputs is not None and self.response_format is not None and self.response_format.is_form:
            raise BadRequestError("Set either response_format or structured_outputs.", "structured_outputs")
        return self


class SearchFields(BaseModel):
    """The fields by which completions and chats ask for a beam search (blink.api.openai.beam_search)."""

    use_beam_search: bool = False
    best_of: int | None = None
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False


def _prompt_kind(value: Any) -> str:
    """Tell the four forms of a prompt apart by the first item, so that errors speak of one form only."""
    if not isinstance(value, list) or not value:
        return "text"
    if isinstance(value[0], str):
        return "texts"
    return "lists of token ids" if isinstance(value[0], list) else "token ids"


Prompt = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[Texts, Tag("texts")]
    | Annotated[TokenIds, Tag("token ids")]
    | Annotated[list[TokenIds], Field(fail_fast=True), Tag("lists of token ids")],
    Discriminator(_prompt_kind),
]


def list_prompts(prompt: Prompt) -> list[str] | list[TokenIds]:
    """Return the prompts of a field as a list of texts or of token ids."""
    if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
        return [prompt]  # pyright: ignore[reportReturnType]
    return prompt  # pyright: ignore[reportReturnType]


class CompletionBody(GenerationBody, SearchFields):
    """POST /v1/completions."""

    prompt: Prompt
    max_tokens: int | None = 16
    logprobs: int | None = None
    echo: bool | None = False
    suffix: str | None = None
    add_special_tokens: bool = True
    user: Any = None

    @model_validator(mode="after")
    def _check_suffix(self) -> CompletionBody:
        if self.suffix and (self.echo or self.truncate_prompt_tokens is not None):
            raise BadRequestError("suffix cannot be combined with echo or truncate_prompt_tokens.", "suffix")
        return self

    @property
    def prompt_logprobs_count(self) -> int | None:
        """Return how many logprobs per prompt token are asked for; an echo has those of the output too."""
        return self.logprobs if self.prompt_logprobs is None and self.echo else self.prompt_logprobs

    @property
    def prompts(self) -> list[str] | list[TokenIds]:
        """Return the prompts as a list of texts or of token ids."""
        return list_prompts(self.prompt)

    @property
    def prompt_rules(self) -> PromptRules:
        """Return how the prompts are to be treated."""
        return self._prompt_rules("prompt", add_special_tokens=self.add_special_tokens)

    @property
    def token_limit(self) -> int | None:
        """Return the client's limit of new tokens."""
        return self.max_tokens

    @property
    def top_logprobs_count(self) -> int | None:
        """Return how many logprobs per token are asked for, None for no logprobs."""
        return self.logprobs


class ConversationBody(Body):
    """Messages and how to render them."""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    tools: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    tool_choice: Any = None
    parallel_tool_calls: StrictBool | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool = True
    _tool_use: ToolUse | None = PrivateAttr(None)

    @model_validator(mode="before")
    @classmethod
    def _check_tool_fields(cls, fields: Any) -> Any:
        if isinstance(fields, dict):
            check_tool_fields(fields)
        return fields

    @model_validator(mode="after")
    def _read_tool_use(self) -> ConversationBody:
        self._tool_use = read_tool_use(self.tools, self.tool_choice, parallel=self.parallel_tool_calls is not False)
        return self

    @property
    def tool_use(self) -> ToolUse | None:
        """Return what the reply may or must call, None for nothing."""
        return self._tool_use

    def rendering(self, defaults: Mapping[str, Any], template: ChatTemplate | None = None) -> Rendering:
        """Return how the messages become a prompt; `defaults` are variables that a request need not give."""
        given = {**defaults, **(self.chat_template_kwargs or {})}
        variables = {"documents": self.documents, **given, "tools": self.tools or None}
        if self.reasoning_effort is not None:
            variables["reasoning_effort"] = self.reasoning_effort
        return Rendering(
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            template=template,
            variables=variables,
        )


class KvTransferParams(BaseModel):
    """What another server has found out about a prompt. Its KV cache is not among it."""

    model_config = ConfigDict(extra="forbid")

    prompt_token_ids: Annotated[list[StrictInt], Field(fail_fast=True, min_length=1)]


class ChatBody(GenerationBody, ConversationBody, SearchFields):
    """POST /v1/chat/completions."""

    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = None
    echo: bool | None = False
    suffix: Literal[""] | None = None
    user: Any = None
    prediction: PredictionBody | None = None
    kv_transfer_params: KvTransferParams | None = None  # its tokens are the prompt, whatever the messages are
    functions: Any = None  # tools, in OpenAI's older form
    function_call: Any = None

    @model_validator(mode="before")
    @classmethod
    def _read_functions(cls, fields: Any) -> Any:
        return with_tools(fields) if isinstance(fields, dict) else fields

    @model_validator(mode="after")
    def _check_logprobs(self) -> ChatBody:
        if self.top_logprobs and not self.logprobs:
            raise BadRequestError("when using `top_logprobs`, `logprobs` must be set to true.", "top_logprobs")
        return self

    @property
    def prompt_rules(self) -> PromptRules:
        """Return how the conversation's text is to be treated."""
        rules = self._prompt_rules("messages", add_special_tokens=self.add_special_tokens)
        return rules if self.prediction is None else rules._replace(prediction=self.prediction.text)

    @property
    def token_limit(self) -> int | None:
        """Return the client's limit of new tokens, None for as many as fit."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def top_logprobs_count(self) -> int | None:
        """Return how many logprobs per token are asked for, None for no logprobs."""
        return (self.top_logprobs or 0) if self.logprobs else None


class TokenizeTextBody(Body):
    """POST /tokenize with a text."""

    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool | None = False


class TokenizeChatBody(ConversationBody):
    """POST /tokenize with messages."""

    return_token_strs: bool | None = False


def _tokenize_kind(value: object) -> str:
    if isinstance(value, dict):
        return "messages" if "messages" in value else "prompt"
    return "messages" if isinstance(value, TokenizeChatBody) else "prompt"


TokenizeBody = Annotated[
    Annotated[TokenizeTextBody, Tag("prompt")] | Annotated[TokenizeChatBody, Tag("messages")],
    Discriminator(_tokenize_kind),
]


class DetokenizeBody(Body):
    """POST /detokenize."""

    tokens: TokenIds
