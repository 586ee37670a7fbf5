"""OpenAI chat and text completions over anything that continues tokens."""

import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from kvherd import __version__
from kvherd.adapters.choices import Run, pieces
from kvherd.core.engine.generation import GenerationRequest, Limits
from kvherd.core.errors import FieldInvalid, PromptTooLong
from kvherd.core.ids import RequestId
from kvherd.core.text.calls import CallOptions, ChatCall, CompletionCall
from kvherd.core.text.choice import Choice, TextDelta
from kvherd.ports.completions import Generate, Tokenizer, Usage
from kvherd.wire.openai.answers import (
    DONE,
    AnswerHead,
    Answers,
    ChatAnswers,
    ChoiceAnswer,
    TextAnswers,
    error_frame,
    usage_fields,
)

_MOST_RUNS = 512
_SEEDS = 2**63

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Plan:
    """All that is decided before anything runs. `runs` has `n` choices for each prompt, in order."""

    prompts: list[list[int]]
    n: int
    runs: list[Run]
    skips_special_tokens: bool

    def usage(self) -> Usage:
        """A prompt counts once, however many choices it has; cached is what none of them had to compute."""
        n = self.n
        choices = [run.choice for run in self.runs]
        least = [
            min(choices[begin : begin + n], key=lambda one: one.cached_tokens) for begin in range(0, len(choices), n)
        ]
        return Usage(
            prompt_tokens=sum(map(len, self.prompts)),
            cached_tokens=sum(choice.cached_tokens for choice in least),
            completion_tokens=sum(choice.completion_tokens for choice in choices),
            host_tokens=sum(choice.host_tokens for choice in least),
            storage_tokens=sum(choice.storage_tokens for choice in least),
        )


class StreamedAnswer:
    """The event stream of one call in the making: news of its choices in, frames out, `end` last."""

    def __init__(self, plan: Plan, answers: Answers, echoes: Sequence[str], *, include_usage: bool) -> None:
        self.plan = plan
        self.opened = False
        self._answers = answers
        self._echoes = echoes
        self._include_usage = include_usage

    def frames(self, index: int, delta: TextDelta) -> bytes:
        """What to send now, perhaps nothing."""
        frames = self._answers.frames(index, delta)
        if self.opened:
            return frames
        self.opened = True
        return b"".join(self._answers.opening(place, echo) for place, echo in enumerate(self._echoes)) + frames

    def around(self, index: int) -> tuple[bytes, bytes]:
        """As `Answers.around`, once it is opened."""
        return self._answers.around(index)

    def end(self) -> bytes:
        usage = self._answers.usage_frame(_fields_of(self.plan.usage())) if self._include_usage else b""
        return usage + DONE


class OpenAiCompletions:
    """Implements `ports.completions.Completions` for one model.

    `vocab_size` 0 leaves the check of given token ids to the engine.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        model_name: str,
        max_context_tokens: int,
        *,
        vocab_size: int = 0,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        self._tokenizer = tokenizer
        self._model_name = model_name
        self._max_context_tokens = max_context_tokens
        self._vocab_size = vocab_size
        self._now_s = now_s

    def prompt_ids(self, call: ChatCall | CompletionCall) -> list[list[int]]:
        if isinstance(call, ChatCall):
            text = self._tokenizer.render_chat(call)
            self._tokenizer.check_length(text)
            return [self._tokenizer.encode(text)]
        several = len(call.prompts) > 1
        return [
            self._one_prompt(prompt, f"prompt[{index}]" if several else "prompt")
            for index, prompt in enumerate(call.prompts)
        ]

    async def whole(
        self,
        call: ChatCall | CompletionCall,
        *,
        request: RequestId,
        generate: Generate,
        prompts: list[list[int]] | None = None,
        on_usage: Callable[[Usage], None] | None = None,
    ) -> bytes:
        """As the port has it; `prompts` may bring what `prompt_ids` gave before, to save the work.

        `on_usage` is called once with what a complete answer cost.
        """
        plan = self.plan(call, request=request, prompts=prompts)
        choices = [ChoiceAnswer(echo) for echo in self._echoes(call, plan)]
        async with aclosing(pieces(plan.runs, generate)) as news:
            async for index, delta in news:
                choices[index].add(delta)
        if on_usage is not None:
            on_usage(plan.usage())
        return self._answers(call, request).whole(choices, _fields_of(plan.usage()))

    async def stream(
        self,
        call: ChatCall | CompletionCall,
        *,
        request: RequestId,
        generate: Generate,
        prompts: list[list[int]] | None = None,
        on_usage: Callable[[Usage], None] | None = None,
    ) -> AsyncGenerator[bytes, None]:
        """As the port has it. Errors of `generate` before its first delta are raised, not streamed."""
        answer = self.streamed(call, request=request, prompts=prompts)
        try:
            async with aclosing(pieces(answer.plan.runs, generate)) as news:
                async for index, delta in news:
                    frames = answer.frames(index, delta)
                    if frames:
                        yield frames
        except Exception as error:
            # the answer's status is sent already: the client can only be told here, and must be told anything
            if not answer.opened:
                raise
            _log.warning("the answer to %s broke off: %r", request, error)
            yield error_frame(error)
            return
        if on_usage is not None:
            on_usage(answer.plan.usage())
        yield answer.end()

    def streamed(
        self, call: ChatCall | CompletionCall, *, request: RequestId, prompts: list[list[int]] | None = None
    ) -> "StreamedAnswer":
        """For whoever runs the generations himself. Raises `CallerError`."""
        plan = self.plan(call, request=request, prompts=prompts)
        return StreamedAnswer(
            plan, self._answers(call, request), self._echoes(call, plan), include_usage=call.options.include_usage
        )

    def plan(
        self, call: ChatCall | CompletionCall, *, request: RequestId, prompts: list[list[int]] | None = None
    ) -> Plan:
        """Decide everything before anything runs. Raises `CallerError`."""
        options = call.options
        prompts = self.prompt_ids(call) if prompts is None else prompts
        if len(prompts) * options.n > _MOST_RUNS:
            raise FieldInvalid("n", f"{len(prompts)} prompts of {options.n} choices are above the limit, {_MOST_RUNS}")
        limits = [self._limits(options, len(prompt)) for prompt in prompts]
        runs = [
            self._run(options, request, prompt, limit, place * options.n + choice, alone=len(prompts) * options.n == 1)
            for place, (prompt, limit) in enumerate(zip(prompts, limits, strict=True))
            for choice in range(options.n)
        ]
        return Plan(prompts, options.n, runs, options.skip_special_tokens)

    def _echoes(self, call: ChatCall | CompletionCall, plan: Plan) -> list[str]:
        """What stands before the text of each choice."""
        if not isinstance(call, CompletionCall) or not call.echo:
            return [""] * len(plan.runs)
        echoes = [
            prompt if isinstance(prompt, str) else self._tokenizer.decode(list(prompt), skip_special_tokens=False)
            for prompt in call.prompts
        ]
        return [echo for echo in echoes for _ in range(plan.n)]

    def _run(
        self,
        options: CallOptions,
        request: RequestId,
        prompt: Sequence[int],
        limits: Limits,
        index: int,
        *,
        alone: bool,
    ) -> Run:
        seed = options.sampling.seed
        if seed is not None:
            # choices of one prompt must differ, and the same call must give the same choices; none is negative
            seed = (seed + index % options.n) % _SEEDS
        generation = GenerationRequest(
            request=request if alone else RequestId(f"{request}-{index}"),
            prompt_token_ids=prompt,
            limits=limits,
            sampling=replace(options.sampling, seed=seed),
            cache_salt=options.cache_salt,
            rank=options.rank,
        )
        decode = self._decoder(skip_special_tokens=options.skip_special_tokens)
        spelt = self._tokenizer.spelt(skip_special_tokens=options.skip_special_tokens)
        return Run(generation, Choice(decode, limits, prompt, token_bytes=spelt))

    def _decoder(self, *, skip_special_tokens: bool) -> Callable[[list[int]], str]:
        return lambda token_ids: self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def _limits(self, options: CallOptions, prompt_tokens: int) -> Limits:
        asked, room = options.max_new_tokens, self._max_context_tokens - prompt_tokens
        if room < (asked or 1):
            raise PromptTooLong(prompt_tokens, asked or 0, self._max_context_tokens)
        limit = room if asked is None else asked
        return replace(options.limits, max_new_tokens=limit, min_new_tokens=min(options.limits.min_new_tokens, limit))

    def _one_prompt(self, prompt: str | tuple[int, ...], path: str) -> list[int]:
        if isinstance(prompt, str):
            self._tokenizer.check_length(prompt)
            token_ids = self._tokenizer.encode(prompt, add_special_tokens=True)
        else:
            token_ids = list(prompt)
            if self._vocab_size and max(token_ids) >= self._vocab_size:
                raise FieldInvalid(path, f"token {max(token_ids)} is not below the vocabulary's {self._vocab_size}")
        if not token_ids:
            raise FieldInvalid(path, "has no tokens")
        return token_ids

    def _answers(self, call: ChatCall | CompletionCall, request: RequestId) -> Answers:
        head = AnswerHead(request, self._model_name, int(self._now_s()), f"kvherd-{__version__}")
        kind = ChatAnswers if isinstance(call, ChatCall) else TextAnswers
        return kind(head, self._tokenizer, logprobs=call.options.sampling.logprobs is not None)


def _fields_of(usage: Usage) -> dict[str, object]:
    return usage_fields(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=usage.cached_tokens,
        host_tokens=usage.host_tokens,
        storage_tokens=usage.storage_tokens,
    )
