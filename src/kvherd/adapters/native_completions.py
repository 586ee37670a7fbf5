"""SGLang's own `POST /generate` over anything that continues tokens."""

import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from kvherd.adapters.choices import Run, pieces
from kvherd.adapters.completions import OpenAiCompletions, Plan
from kvherd.core.ids import RequestId
from kvherd.core.text.calls import NativeCall
from kvherd.ports.completions import Generate, Usage
from kvherd.wire.openai.answers import DONE, error_frame, sse
from kvherd.wire.sglang_native import NativeAnswer, encode_answers

_log = logging.getLogger(__name__)


class NativeCompletions:
    """Implements `ports.completions.NativeCompletions`."""

    def __init__(self, completions: OpenAiCompletions) -> None:
        self._completions = completions

    async def whole(
        self,
        native: NativeCall,
        *,
        request: RequestId,
        generate: Generate,
        prompts: list[list[int]] | None = None,
        on_usage: Callable[[Usage], None] | None = None,
    ) -> bytes:
        plan = self._completions.plan(native.call, request=request, prompts=prompts)
        answers = _begin(plan)
        async with aclosing(pieces(plan.runs, generate)) as news:
            async for index, delta in news:
                answers[index].add(delta)
        if on_usage is not None:
            on_usage(plan.usage())
        done = [_fields(answer, run) for answer, run in zip(answers, plan.runs, strict=True)]
        return encode_answers(done, listed=native.listed)

    async def stream(
        self,
        native: NativeCall,
        *,
        request: RequestId,
        generate: Generate,
        prompts: list[list[int]] | None = None,
        on_usage: Callable[[Usage], None] | None = None,
    ) -> AsyncGenerator[bytes, None]:
        """Errors of `generate` before its first delta are raised, later ones become an error event and the end."""
        plan = self._completions.plan(native.call, request=request, prompts=prompts)
        answers = _begin(plan)
        opened = False
        try:
            async with aclosing(pieces(plan.runs, generate)) as news:
                async for index, delta in news:
                    answers[index].add(delta)
                    opened = True
                    fields = _fields(answers[index], plan.runs[index])
                    yield sse(fields | {"index": index} if native.listed else fields)
        except Exception as error:
            # the answer's status is sent already: the client can only be told here, and must be told anything
            if not opened:
                raise
            _log.warning("the answer to %s broke off: %r", request, error)
            yield error_frame(error)
            return
        if on_usage is not None:
            on_usage(plan.usage())
        yield DONE


def _begin(plan: Plan) -> list[NativeAnswer]:
    return [NativeAnswer(run.request.request, index) for index, run in enumerate(plan.runs)]


def _fields(answer: NativeAnswer, run: Run) -> dict[str, Any]:
    fields: dict[str, Any] = answer.fields(
        prompt_tokens=run.choice.prompt_tokens,
        completion_tokens=run.choice.completion_tokens,
        cached_tokens=run.choice.cached_tokens,
        host_tokens=run.choice.host_tokens,
        storage_tokens=run.choice.storage_tokens,
        logprobs=run.request.sampling.logprobs is not None,
    )
    return fields
