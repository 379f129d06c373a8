# SPDX-License-Identifier: Apache-2.0
"""The programs of examples/clients/: what each needs, what the model answers it, and what it then prints.

docs/clients.md lists them, tests/e2e/test_clients.py runs them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from parrot_model import Rule, call

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "clients"
_SUNNY = "Rome: sunny, 27 degrees"
_ANNA = json.dumps({"name": "Anna", "age": 31})
_PERSON = "Person(name='Anna', age=31)"

# What several programs ask.
_COMMON = (
    Rule(("weather in Rome", "27 degrees"), "It is sunny in Rome."),
    Rule(("weather in Rome",), call("forecast", city="Rome")),
    Rule(("capital of France",), "The capital of France is Paris."),
    Rule(("Describe Anna",), _ANNA),
)
_PARIS, _ROME = "The capital of France is Paris.", "It is sunny in Rome."


@dataclass(frozen=True, slots=True)
class Program:
    """A client's program: its file, its packages, of which the first is the client, and what it prints."""

    file: str
    packages: tuple[str, ...]
    prints: tuple[str, ...]  # lines, each as often as it stands here
    rules: tuple[Rule, ...] = ()
    without: tuple[str, ...] = ()  # beginnings of packages that it names and does not need, of some GB

    @property
    def name(self) -> str:
        return Path(self.file).stem

    @property
    def client(self) -> str:
        """Return the client's package."""
        return self.packages[0].partition("[")[0]

    @property
    def is_node(self) -> bool:
        """Say whether its packages are npm's."""
        return self.packages[0].startswith("@") or self.file.endswith(".mjs")


_LITELLM = Program(
    "litellm_providers.py",
    ("litellm",),
    (
        *(
            line
            for provider in ("openai", "hosted_vllm", "anthropic", "ollama_chat", "ollama")
            for line in (f"{provider}: {_PARIS} [stop]", f"{provider} streamed: {_PARIS}")
        ),
        *(
            line
            for provider in ("openai", "hosted_vllm", "anthropic", "ollama_chat")
            for line in (*(f"{provider} calls forecast({{'city': 'Rome'}})",) * 2, f"{provider}: {_ROME}")
        ),
        *(
            f"{provider}: {error}"
            for provider in ("openai", "hosted_vllm", "anthropic")
            for error in ("ContextWindowExceededError 400", "NotFoundError 404", "BadRequestError 400")
        ),
        "text-completion-openai: one two",
    ),
)
_LANGCHAIN_ANTHROPIC = Program(
    "langchain_anthropic_client.py",
    ("langchain-anthropic",),
    (_PARIS, f"streamed: {_PARIS}", "forecast({'city': 'Rome'})", _ROME, _PERSON),
    (Rule(("Anna is 31 years old",), call("Person", name="Anna", age=31)),),
)
_LLAMA_INDEX = Program(
    "llama_index_client.py",
    ("llama-index-llms-openai-like",),
    (_PARIS, f"streamed: {_PARIS}", f"completed: {_PARIS}", _PERSON, f"agent: {_ROME}"),
)
_DSPY_ANSWER = "[[ ## %s ## ]]\n%s\n\n"
_DSPY_END = "[[ ## completed ## ]]"


def _dspy(**fields: str) -> str:
    return "".join(_DSPY_ANSWER % field for field in fields.items()) + _DSPY_END


_DSPY = Program(
    "dspy_client.py",
    ("dspy",),
    ("Paris", "good 6", "bad 2", "Six sevens are 42. 43", f"{_SUNNY} | {_ROME}"),
    (
        Rule(("capital of France", "[[ ## question ## ]]"), _dspy(answer="Paris")),
        Rule(("I would buy it again",), _dspy(sentiment="good", stars="5")),
        Rule(("It broke on the first day",), json.dumps({"sentiment": "bad", "stars": 1})),
        Rule(("6 times 7", "[[ ## question ## ]]"), _dspy(reasoning="Six sevens are 42.", answer="42")),
        Rule(
            ("weather in Rome", "27 degrees", "next_thought"),
            _dspy(next_thought="I know.", next_tool_name="finish", next_tool_args="{}"),
        ),
        Rule(("weather in Rome", "27 degrees", "[[ ## reasoning"), _dspy(reasoning="It was told.", answer=_ROME)),
        Rule(
            ("weather in Rome", "next_thought"),
            _dspy(next_thought="I ask.", next_tool_name="forecast", next_tool_args='{"city": "Rome"}'),
        ),
    ),
)
_OUTLINES = Program(
    "outlines_client.py",
    ("outlines", "openai"),
    (
        *(
            f"{kind} {rest}"
            for kind in ("openai", "vllm")
            for rest in (_PARIS, f"streamed {_PARIS}", "name='Anna' age=31")
        ),
        "good",
        "2026-04",
        "40 + 2",
    ),
    (
        Rule(("good or bad",), "good or bad"),
        Rule(("When did Blink start",), "2026-04-08"),
        Rule(("Write a sum",), "40 + 2"),
    ),
)
_HAYSTACK = Program(
    "haystack_client.py", ("haystack-ai",), (f"{_PARIS} stop", f"streamed: {_PARIS}", f"agent: {_ROME}")
)
_SMOLAGENTS = Program(
    "smolagents_client.py",
    ("smolagents[openai]",),
    (_PARIS, f"streamed: {_PARIS}", "tool: It is sunny in Oslo.", "code: 42", "streamed code: 42"),
    (
        Rule(("weather in Oslo", "27 degrees"), call("final_answer", answer="It is sunny in Oslo.")),
        Rule(("weather in Oslo",), call("forecast", city="Oslo")),
        Rule(("6 times 7",), "Thought: I multiply.\n<code>\nfinal_answer(6 * 7)\n</code>"),
    ),
)
_OPENAI_AGENTS = Program(
    "openai_agents_client.py",
    ("openai-agents",),
    (_ROME, f"streamed: {_ROME} True", _PERSON, f"Reporter | {_ROME}") * 2,  # by chats, by responses
    (
        Rule(("Ask the reporter", "27 degrees"), _ROME),
        Rule(("Ask the reporter", "assistant"), call("forecast", city="Rome")),
        Rule(("Ask the reporter",), call("transfer_to_reporter")),
    ),
)
_SUM = "sum of 1 to 10"
_CLAUDE_CODE = Program(
    "claude_code.sh",
    ("@anthropic-ai/claude-code",),
    ("It prints 55.", "sum.py: 55"),
    (
        Rule((_SUM, '"name": "Bash"', "55"), "It prints 55."),
        Rule((_SUM, '"name": "Write"'), call("Bash", command="python3 sum.py", description="Run the program")),
        Rule((_SUM,), call("Write", file_path="sum.py", content="print(sum(range(1, 11)))\n")),
    ),
)
_SQUARES = "squares of 1 to 3"
_CODEX = Program(
    "codex_cli.sh",
    ("@openai/codex",),
    ("It prints 1 4 9.", "squares.py: 1 4 9"),
    (
        Rule((_SQUARES, "1 4 9"), "It prints 1 4 9."),
        Rule((_SQUARES, "in range"), call("exec_command", cmd="python3 squares.py")),
        Rule((_SQUARES,), call("exec_command", cmd="echo 'print(*[n * n for n in range(1, 4)])' > squares.py")),
    ),
)
_VERCEL = Program(
    "vercel_ai.mjs",
    ("ai", "zod", "@ai-sdk/openai-compatible", "@ai-sdk/openai", "@ai-sdk/anthropic"),
    tuple(
        f"{provider}{line}"
        for provider in ("compatible", "chat", "responses", "anthropic")
        for line in (
            f": {_PARIS} [stop]",
            f" streamed: {_PARIS}",
            f" in 2 steps: {_ROME}",
            f" streamed in 2 steps: {_ROME}",
            " object: Anna, 31",
            " error: 400 true",
        )
    ),
)
_LLM = Program(
    "llm_cli.sh",
    ("llm",),
    (_PARIS, f"whole: {_PARIS}", _ANNA, _ROME, "Three million."),
    (Rule(("how many inhabitants",), "Three million."),),
)
_GUIDELLM = Program(
    "guidellm_benchmark.sh", ("guidellm",), ("requests: {'successful': 5, 'errored': 0, 'incomplete': 0, 'total': 5}",)
)
_AIDER = Program(
    "aider_edit.sh",
    ("aider-chat",),
    ("greeting.py: Goodbye",),
    (
        Rule(
            ("Let greeting.py say Goodbye",),
            'greeting.py\n```python\n<<<<<<< SEARCH\nprint("Hello")\n=======\nprint("Goodbye")\n>>>>>>> REPLACE\n```\n',
        ),
    ),
)
_OPEN_WEBUI = Program(
    "open_webui_headless.py",
    ("open-webui",),
    (_PARIS, f"streamed: {_PARIS}"),
    without=("cuda-", "nvidia-", "torch=", "triton="),
)

PROGRAMS = (
    _LITELLM,
    _LANGCHAIN_ANTHROPIC,
    _LLAMA_INDEX,
    _DSPY,
    _OUTLINES,
    _HAYSTACK,
    _SMOLAGENTS,
    _OPENAI_AGENTS,
    _LLM,
    _GUIDELLM,
    _AIDER,
    _CLAUDE_CODE,
    _CODEX,
    _VERCEL,
    _OPEN_WEBUI,
)
# Each program asks other things, or the same as all: one model answers them.
RULES = (*(rule for program in PROGRAMS for rule in program.rules), *_COMMON)
