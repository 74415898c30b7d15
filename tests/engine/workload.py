"""What a seed asks of an engine: its shape, its habits, its requests and its mishaps.

Pure: equal seeds give equal plans. Instances of one seed share a namespace, the
layout of a block and the documents that prompts begin with; all else is each one's own.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from tests.engine.content import TokenChain
from tests.engine.pool import ARRANGEMENTS, PoolShape

STEPS = 160


@dataclass(frozen=True, slots=True)
class Habits:
    """How this engine behaves: the differences between releases and runners."""

    #: `wait_for_save` is not called in steps without a forward (before 0.31).
    skips_wait_for_save: bool
    #: Loads start before the forward (before 0.29), else after it.
    loads_before_forward: bool
    #: The finish hook runs before a last region is written (a draft model, V1 runner).
    draft_after_finish: bool
    #: `clear_connector_metadata` never comes (pipeline ranks that are not the last).
    skips_clear: bool
    #: The finish hook is called twice in some steps.
    finishes_twice: bool
    reuses_at_once: bool
    step_tokens_max: int
    running_max: int
    #: What a forward takes on top of our own bookkeeping, with the GIL released.
    forward_s: float


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request: when it comes, what it says, and when it is given up."""

    step: int
    prompt: tuple[int, ...]
    answer_tokens: int
    #: Steps after arrival, None for never.
    abort_after: int | None


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that one instance does under one seed."""

    seed: int
    engine: int
    salt: str
    shape: PoolShape
    ranks: int
    habits: Habits
    arrivals: tuple[Arrival, ...]
    #: Steps whose forward raises, with the ranks on which it does.
    raises: dict[int, tuple[int, ...]] = field(default_factory=dict)
    #: Steps before which the engine drops its own prefix cache, if it can.
    drops: frozenset[int] = frozenset()
    #: Steps before which the engine resets the connector, too.
    resets: frozenset[int] = frozenset()
    #: A reset means new weights: the same tokens have other bytes. Needs a namespace of one.
    reset_changes_weights: bool = False
    #: Steps in which nothing may be scheduled (the engine is paused).
    pauses: frozenset[int] = frozenset()


def plan_of(seed: int, engine: int, *, ranks: int = 2, token_bytes: int = 2048) -> Plan:
    """The plan of one engine under a seed."""
    shared = random.Random(f"shared {seed}")
    own = random.Random(f"engine {engine} of {seed}")
    alone = shared.random() < 0.25
    layers = shared.randint(1, 4)
    blocks = own.randint(18, 44)
    shape = PoolShape(
        arrangement=shared.choice(ARRANGEMENTS),
        blocks=blocks,
        block_tokens=4,
        layers=layers,
        token_bytes=token_bytes,
    )
    documents = [
        tuple(shared.randrange(1000) for _ in range(shared.randint(8, 60))) for _ in range(5)
    ]
    steps = range(2, STEPS)
    raises = {
        step: tuple(rank for rank in range(ranks) if own.random() < 0.7) or (0,)
        for step in own.sample(steps, own.choice((0, 0, 1, 3)))
    }
    salt = f"seed {seed} engine {engine}" if alone else f"seed {seed}"
    return Plan(
        seed=seed,
        engine=engine,
        salt=salt,
        shape=shape,
        ranks=ranks,
        habits=_habits(own),
        arrivals=tuple(sorted(_arrivals(own, documents, shape, salt), key=lambda one: one.step)),
        raises=raises,
        drops=frozenset(own.sample(steps, own.choice((0, 2, 6)))),
        resets=frozenset(own.sample(steps, own.choice((0, 1, 2) if alone else (0, 0, 1)))),
        reset_changes_weights=alone,
        pauses=frozenset(own.sample(steps, own.choice((0, 8)))),
    )


def _habits(own: random.Random) -> Habits:
    return Habits(
        skips_wait_for_save=own.random() < 0.5,
        loads_before_forward=own.random() < 0.5,
        draft_after_finish=own.random() < 0.4,
        skips_clear=own.random() < 0.15,
        finishes_twice=own.random() < 0.3,
        reuses_at_once=own.random() < 0.6,
        step_tokens_max=own.choice((8, 24, 64)),
        running_max=own.choice((3, 6, 10)),
        forward_s=own.choice((0.0, 0.001, 0.003)),
    )


def _arrivals(
    own: random.Random, documents: list[tuple[int, ...]], shape: PoolShape, salt: str
) -> list[Arrival]:
    # The longest request must fit alone, or it could never run.
    tokens_max = (shape.blocks - 2) * shape.block_tokens - 20
    found = []
    for _ in range(own.randint(25, 60)):
        document = own.choice(documents)
        kept = own.choice((len(document), own.randint(1, len(document))))
        tail = tuple(own.randrange(1000) for _ in range(own.choice((0, 0, 1, 3, 9))))
        prompt = (document[:kept] + tail)[:tokens_max]
        if found and own.random() < 0.3:
            # The next turn of a conversation: an earlier prompt, its whole answer, a word more.
            earlier = own.choice(found)
            chain = TokenChain(salt, list(earlier.prompt), shape.block_tokens)
            for _ in range(earlier.answer_tokens):
                chain.append_answer()
            prompt = (*chain.tokens, own.randrange(1000))[:tokens_max]
        found.append(
            Arrival(
                step=own.randrange(STEPS * 2 // 3),
                prompt=prompt,
                answer_tokens=own.choice((1, 2, 4, 5, 8, 13, 21)),
                abort_after=own.choice((None, None, None, own.randint(0, 12))),
            )
        )
    return found
