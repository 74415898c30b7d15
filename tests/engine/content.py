"""What the bytes of a token's KV must be: a function of its prefix, region, rank and weights.

Pure. So that any mix-up is seen, no two (prefix, region, rank, weights version) have equal
bytes, and a block's hash is a function of its tokens alone, as an engine's is.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import Final

_DIGEST_BYTES: Final = 16
HASH_BYTES: Final = 32
# One hash gives this many bytes a token and region; a token's KV is them over and over.
_PATTERN_BYTES: Final = 32
# What a destination holds until a load has filled it: the content of no token.
POISON: Final = 0xEE


def extend_prefix(digest: bytes, token: int) -> bytes:
    """The digest of a prefix that is one token longer."""
    return hashlib.blake2b(digest + token.to_bytes(4, "little"), digest_size=_DIGEST_BYTES).digest()


def root_of(salt: str) -> bytes:
    """The digest of the empty prefix of one namespace."""
    return hashlib.blake2b(salt.encode(), digest_size=_DIGEST_BYTES).digest()


def block_hash(digest: bytes) -> bytes:
    """The engine's hash of the block that ends with this prefix."""
    return hashlib.blake2b(digest, digest_size=HASH_BYTES, person=b"block").digest()


def next_token(digest: bytes) -> int:
    """What a greedy model would answer: equal for equal prefixes, on every engine."""
    return int.from_bytes(hashlib.blake2b(digest, digest_size=2, person=b"answer").digest())


@lru_cache(maxsize=1 << 16)
def _patterns(digest: bytes, weights: int, rank: int, regions: int) -> tuple[bytes, ...]:
    seed = digest + weights.to_bytes(4, "little") + rank.to_bytes(2, "little")
    drawn = hashlib.shake_128(seed).digest(_PATTERN_BYTES * regions)
    return tuple(
        drawn[region * _PATTERN_BYTES : (region + 1) * _PATTERN_BYTES] for region in range(regions)
    )


def token_bytes(
    digest: bytes, weights: int, rank: int, region: int, regions: int, size_bytes: int
) -> bytes:
    """KV of the last token of the prefix, in one region of one rank."""
    pattern = _patterns(digest, weights, rank, regions)[region]
    return (pattern * (size_bytes // _PATTERN_BYTES + 1))[:size_bytes]


class TokenChain:
    """The tokens of one request with the digest of every prefix of them."""

    def __init__(self, salt: str, tokens: list[int], block_tokens: int) -> None:
        self._digests = [root_of(salt)]
        self._block_tokens = block_tokens
        self.tokens: list[int] = []
        self.hashes: list[bytes] = []
        for token in tokens:
            self.append(token)

    def append(self, token: int) -> None:
        self.tokens.append(token)
        self._digests.append(extend_prefix(self._digests[-1], token))
        if len(self.tokens) % self._block_tokens == 0:
            self.hashes.append(block_hash(self._digests[-1]))

    def append_answer(self) -> None:
        self.append(next_token(self._digests[-1]))

    def digest_of(self, position: int) -> bytes:
        """Digest of the prefix that ends with the token at position."""
        return self._digests[position + 1]
