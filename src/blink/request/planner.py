# SPDX-License-Identifier: Apache-2.0
"""From prompts and sampling parameters to checked sequences, the same for HTTP and for `LLM`."""

from __future__ import annotations

import random
import secrets
from collections.abc import Sequence
from typing import NamedTuple

from blink.errors import BadRequestError
from blink.grammar.automaton import Automaton
from blink.link.client import RegionInfo
from blink.request.automata import AutomatonCache
from blink.request.compilation import Client, Compilation
from blink.request.reasoning_budget import limit_reasoning
from blink.request.token_rules import apply_token_rules
from blink.sampling_params import SamplingParams
from blink.text.assets import ModelAssets
from blink.text.detokenizer import Tokens
from blink.text.generation import Generation
from blink.text.message.parser import MessageForm
from blink.text.prompt import Prompt, PromptRules, Source, prepare_prompts, prepare_prompts_now

_SEED_MASK = 2**64 - 1
_STRUCTURED = "structured_outputs"
_PREDICTED_CHARS = 16  # of a prediction for each token that an answer may have


class PlannedSequence(NamedTuple):
    """One sequence as the engine will get it, and what will become of its tokens."""

    prompt: Prompt
    params: SamplingParams
    seed: int
    eos_token_ids: tuple[int, ...]
    generation: Generation
    automaton: Automaton | None = None
    prediction: Tokens = ()


class Plan(NamedTuple):
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
                chosen = fitted if place == 0 else fitted.derive(prompt_logprobs=None)
                generation = Generation(
                    len(sequences), assets.tokenizer, chosen, assets.eos_token_ids, prompt.tokens, form
                )
                seed = (base + place) & _SEED_MASK
                sequences.append(
                    PlannedSequence(prompt, chosen, seed, assets.eos_token_ids, generation, automaton, prediction)
                )
        return Plan(prompts, sequences, params.n)

    def _predict(self, text: str, engine: RegionInfo) -> Tokens:
        """Return the tokens that answers may have much of; none for an engine that does not speculate."""
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
        rules = rules._replace(cache_salt=secrets.token_hex())
    if params.truncate_prompt_tokens is not None:
        rules = rules._replace(truncate=params.truncate_prompt_tokens)
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
    return params.derive(max_tokens=max_tokens)
