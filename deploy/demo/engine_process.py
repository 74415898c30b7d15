"""One vLLM engine in a process of its own, driven by lines of JSON over a socket.

Started as `python engine_process.py FD`; FD is one end of a stream socketpair. Owns the
engine. Whatever vLLM writes goes to the standard streams, which the parent points at a
file. Ends when told to and when the parent closes the socket; its starter binds its life to
the parent's.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
import traceback
from typing import Any


class Engine:
    """The acts a parent may ask for; each returns what is to be answered."""

    def __init__(self) -> None:
        self._llm: Any = None
        self._number = 0

    def act_start(self, options: dict[str, Any]) -> dict[str, Any]:
        from vllm import LLM  # noqa: PLC0415 - half a minute of imports, after the parent knows us

        began_s = time.monotonic()
        self._llm = LLM(**options)
        return {"took_s": time.monotonic() - began_s}

    def act_generate(
        self,
        prompts: list[list[int]],
        max_tokens: int,
        together: bool = False,
        abort_after_steps: list[int | None] | None = None,
    ) -> dict[str, Any]:
        """Run prompts one after another, or all together, and let the engine settle."""
        before = self._counters()
        answers: list[dict[str, Any]] = []
        rounds = [prompts] if together else [[prompt] for prompt in prompts]
        for batch in rounds:
            answers += self._run(batch, max_tokens, abort_after_steps)
        self.act_settle()
        after = self._counters()
        counters = {name: after[name] - before.get(name, 0) for name in after}
        return {"answers": answers, "counters": counters}

    def act_settle(self, steps: int = 8) -> dict[str, Any]:
        """Take the steps without a forward that a serving loop would take by itself."""
        core = getattr(self._llm.llm_engine.engine_core, "engine_core", None)
        if core is not None:
            for _ in range(steps):
                core.step()
        return {}

    def act_drop_cache(self, connector: bool = False) -> dict[str, Any]:
        return {"dropped": bool(self._llm.reset_prefix_cache(reset_connector=connector))}

    def act_stop(self) -> dict[str, Any]:
        if self._llm is not None:
            self._llm.llm_engine.engine_core.shutdown()
        return {}

    def _run(
        self, prompts: list[list[int]], max_tokens: int, aborts: list[int | None] | None
    ) -> list[dict[str, Any]]:
        from vllm import SamplingParams  # noqa: PLC0415 - as in act_start

        sampling = SamplingParams(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
        )
        engine = self._llm.llm_engine
        answers: dict[str, dict[str, Any]] = {}
        abort_at: dict[str, int] = {}
        for index, prompt in enumerate(prompts):
            request_id = f"request-{self._number}"
            self._number += 1
            answers[request_id] = {"began_s": time.monotonic()}
            engine.add_request(request_id, {"prompt_token_ids": prompt}, sampling)
            if aborts is not None and aborts[index] is not None:
                abort_at[request_id] = int(aborts[index] or 0)
        steps = 0
        while engine.has_unfinished_requests():
            for request_id in [name for name, step in abort_at.items() if step <= steps]:
                engine.abort_request([request_id])
                answers[request_id] |= {"aborted": True}
                del abort_at[request_id]
            steps += 1
            for output in engine.step():
                answer = answers[output.request_id]
                tokens = list(output.outputs[0].token_ids)
                if tokens and "first_token_s" not in answer:
                    answer["first_token_s"] = time.monotonic() - answer["began_s"]
                answer["tokens"] = tokens
                answer["cached_tokens"] = output.num_cached_tokens
        return [
            {name: value for name, value in answer.items() if name != "began_s"}
            for answer in answers.values()
        ]

    def _counters(self) -> dict[str, int]:
        wanted = {
            "vllm:external_prefix_cache_hits": "external_hit_tokens",
            "vllm:external_prefix_cache_queries": "external_query_tokens",
            "vllm:prefix_cache_hits": "own_hit_tokens",
            "vllm:num_preemptions": "preemptions",
        }
        found: dict[str, int] = dict.fromkeys(wanted.values(), 0)
        for metric in self._llm.get_metrics():
            if metric.name in wanted:
                found[wanted[metric.name]] += int(metric.value)
        return found


def serve(connection: socket.socket) -> None:
    """Answer line by line until told to stop, or until the parent is gone."""
    engine = Engine()
    with connection.makefile("r", encoding="utf-8") as lines:
        for line in lines:
            request = json.loads(line)
            name = request.pop("act")
            try:
                answer = getattr(engine, f"act_{name}")(**request)
            except Exception:  # noqa: BLE001 - the parent shows it and decides
                answer = {"error": traceback.format_exc()}
            connection.sendall(json.dumps(answer).encode() + b"\n")
            if name == "stop":
                return


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # the engine is shut down; its libraries' exit hooks may wait for ever
