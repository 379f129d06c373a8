# SPDX-License-Identifier: Apache-2.0
"""From prompts or messages and sampling parameters to checked sequences, the same for HTTP and for `LLM`."""

from __future__ import annotations

import random
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from blink.errors import BadRequestError
from blink.grammar.automaton import Automaton
from blink.link.client import RegionInfo
from blink.link.queue_pair import NO_ADAPTER, AdapterId
from blink.request.automata import AutomatonCache
from blink.request.compilation import Client, Compilation
from blink.request.reasoning_budget import limit_reasoning
from blink.request.token_rules import apply_token_rules
from blink.sampling_params import SamplingParams
from blink.text.assets import ModelAssets
from blink.text.conversation import flatten_messages
from blink.text.detokenizer import Tokens
from blink.text.fitting import fit_messages
from blink.text.generation import Generation
from blink.text.harmony_prompt import arrange_messages, check_effort, describe_tools, spell
from blink.text.message.parser import MessageForm
from blink.text.prompt import Prompt, PromptRules, Source, prepare_prompts, prepare_prompts_now
from blink.text.template import ChatTemplate
from blink.text.template_traits import TemplateTraits
from blink.text.tool_prompt import put_tools_in_message, tell_tools

_SEED_MASK = 2**64 - 1
_STRUCTURED = "structured_outputs"
_PREDICTED_CHARS = 16  # of a prediction for each token that an answer may have


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendering:
    """How a conversation becomes a prompt; `variables` go to the chat template."""

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template: ChatTemplate | None = None  # None: the model's
    variables: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class PlannedSequence:
    """One sequence as the engine will get it, and what will become of its tokens."""

    prompt: Prompt
    params: SamplingParams
    seed: int
    eos_token_ids: tuple[int, ...]
    generation: Generation
    automaton: Automaton | None = None
    prediction: Tokens = ()
    adapter: AdapterId = NO_ADAPTER


@dataclass(frozen=True, slots=True)
class Plan:
    """The sequences of one request: those of the first prompt, then those of the next."""

    prompts: list[Prompt]
    sequences: list[PlannedSequence]
    num_choices: int  # per prompt


class Planner:
    """Plan the requests for one model.

    Args:
        compilation: compiles for plan(); the owner starts and closes it.
    """

    def __init__(self, assets: ModelAssets, compilation: Compilation | None = None) -> None:
        self._assets = assets
        self._compilation = compilation
        self._automata = AutomatonCache()
        self._draw_seed = random.Random(assets.seed).getrandbits if assets.seed else secrets.randbits

    def render(self, messages: Sequence[Mapping[str, Any]], rendering: Rendering) -> str:
        """Return the prompt text of a conversation, for Tokenizer.encode().

        Raises:
            BadRequestError: the model has no chat template, or it or a message does not fit.
        """
        if not messages:
            raise BadRequestError("messages must not be empty.", "messages")
        if rendering.continue_final_message and rendering.add_generation_prompt:
            raise BadRequestError(
                "Cannot set both `continue_final_message` and `add_generation_prompt` to True.",
                "continue_final_message",
            )
        tools = rendering.variables.get("tools") or ()
        template = rendering.template or self._assets.template_for(tools)
        if template is None:
            raise BadRequestError(
                "The model has no chat template; send a prompt, or start with --chat-template.", "messages"
            )
        try:
            arranged, variables = self._arrange(messages, tools, rendering.variables, template.traits)
            return template.render(
                arranged,
                add_generation_prompt=rendering.add_generation_prompt,
                continue_final_message=rendering.continue_final_message,
                variables=variables,
            )
        except RecursionError:
            raise BadRequestError("The messages are nested too deeply.", "messages") from None

    def _arrange(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any],
        traits: TemplateTraits,
    ) -> tuple[Sequence[Mapping[str, Any]], Mapping[str, Any]]:
        """Return the messages and variables as the template takes them."""
        flat: Sequence[Mapping[str, Any]] = flatten_messages(messages, text_arguments=traits.text_arguments)
        if self._assets.uses_harmony:
            check_effort(variables.get("reasoning_effort", "medium"))
            letters = self._assets.tokenizer.spell
            flat = spell(arrange_messages(flat), letters)
            variables = {**variables, "tools": spell(describe_tools(tools), letters) or None}
        if traits.tools_place == "none":
            flat = tell_tools(flat, tools)
        elif traits.tools_place == "message" and tools:
            flat = put_tools_in_message(flat, tools)
        return fit_messages(flat, traits), variables

    async def plan(
        self,
        sources: Sequence[Source],
        params: SamplingParams,
        rules: PromptRules,
        engine: RegionInfo,
        client: Client,
        form: MessageForm | None = None,
    ) -> Plan:
        """Check a request for all its prompts and plan it; long prompts are tokenized in a thread.

        form: how its replies are read, None where their text is their content.

        Raises:
            BadRequestError: the engine cannot do it; `param` names what to change.
            ClientLimitError: its client waits for too much already.
            OverloadedError: too much waits.
        """
        params = apply_token_rules(params, self._assets.tokenizer, engine)
        check_request(params, len(sources), engine)
        rules = _rules_of(params, rules)
        structured = params.structured_outputs
        automaton = None
        if structured is not None:
            assert self._compilation is not None
            automaton = await self._compilation.compile(structured, client)
        prompts = await prepare_prompts(sources, rules, self._assets.tokenizer, engine, params.max_tokens)
        return self._plan_sequences(prompts, params, rules, engine, automaton, form)

    def plan_now(
        self, sources: Sequence[Source], params: SamplingParams, rules: PromptRules, engine: RegionInfo
    ) -> Plan:
        """Do what plan() does in the calling thread.

        Raises:
            BadRequestError: the engine cannot do it; `param` names what to change.
        """
        params = apply_token_rules(params, self._assets.tokenizer, engine)
        check_request(params, len(sources), engine)
        rules = _rules_of(params, rules)
        structured = params.structured_outputs
        automaton = None if structured is None else self._automata.compile(structured)
        prompts = prepare_prompts_now(sources, rules, self._assets.tokenizer, engine, params.max_tokens)
        return self._plan_sequences(prompts, params, rules, engine, automaton)

    def _plan_sequences(
        self,
        prompts: list[Prompt],
        params: SamplingParams,
        rules: PromptRules,
        engine: RegionInfo,
        automaton: Automaton | None,
        form: MessageForm | None = None,
    ) -> Plan:
        assets = self._assets
        prediction = self._predict(rules.prediction, engine)
        sequences: list[PlannedSequence] = []
        for prompt in prompts:
            fitted = limit_reasoning(fit_max_tokens(params, prompt, engine.max_model_len), prompt.tokens, form, assets)
            base = self._draw_seed(64) if params.seed is None else params.seed
            for place in range(params.n):
                # The prompt's own logprobs are the same for all choices: the first brings them.
                chosen = fitted if place == 0 else replace(fitted, prompt_logprobs=None)
                generation = Generation(
                    len(sequences), assets.tokenizer, chosen, assets.eos_token_ids, prompt.tokens, form
                )
                seed = (base + place) & _SEED_MASK
                eos = assets.eos_token_ids
                sequences.append(
                    PlannedSequence(prompt, chosen, seed, eos, generation, automaton, prediction, rules.adapter)
                )
        return Plan(prompts, sequences, params.n)

    def _predict(self, text: str, engine: RegionInfo) -> Tokens:
        """Return the tokens that answers may have much of; none for an engine that makes no drafts."""
        if not (text and engine.speculates):
            return ()
        known = text[: _PREDICTED_CHARS * engine.max_model_len]
        return self._assets.tokenizer.encode(known, add_special_tokens=False)[: engine.max_model_len]


def check_request(params: SamplingParams, num_prompts: int, engine: RegionInfo) -> None:
    """Refuse what this engine would not do.

    Raises:
        BadRequestError: a priority without its policy, a token id that is none, or too many sequences.
    """
    if params.priority and engine.scheduling_policy != "priority":
        raise BadRequestError('Got priority but the scheduling policy is not "priority".', "priority")
    for param in ("stop_token_ids", "logit_bias", "allowed_token_ids", "logprob_token_ids"):
        for token in getattr(params, param) or ():
            if not 0 <= token < engine.vocab_size:
                told = f"{param}: {token} is not a token id of this model, which has {engine.vocab_size}."
                raise BadRequestError(told, param)
    if params.structured_outputs is not None and not engine.can_constrain:
        raise BadRequestError("This server's engine has no tokenizer, which structured outputs need.", _STRUCTURED)
    if params.n * num_prompts > engine.max_sequences:
        raise BadRequestError(f"One request may ask for at most {engine.max_sequences} sequences.", "n")


def _rules_of(params: SamplingParams, rules: PromptRules) -> PromptRules:
    """Return the rules of a request's prompts with what its parameters say of them."""
    if params.skip_reading_prefix_cache:
        rules = replace(rules, cache_salt=secrets.token_hex())
    if params.truncate_prompt_tokens is not None:
        rules = replace(rules, truncate=params.truncate_prompt_tokens)
    return rules


def fit_max_tokens(params: SamplingParams, prompt: Prompt, max_model_len: int) -> SamplingParams:
    """Let a request without a limit fill the context.

    Raises:
        BadRequestError: its min_tokens do not fit.
    """
    if params.max_tokens is not None:
        return params
    max_tokens = max_model_len - prompt.num_tokens
    if params.min_tokens > max_tokens:
        raise BadRequestError(f"min_tokens must be at most {max_tokens} after this prompt.", "min_tokens")
    return replace(params, max_tokens=max_tokens)
