"""SGLang's KV pools and allocator, in the shapes that its out-of-tree platform call expects."""

from __future__ import annotations

from typing import Any

from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool


class LatentKVPool(MLATokenToKVPool):
    """SGLang's MLA pool; the platform call passes an argument for sparse attention that it does not take."""

    def __init__(self, *args: Any, index_head_dim: int | None = None, **kwargs: Any) -> None:
        if index_head_dim is not None:
            raise ValueError("sparse attention (DSA) needs a GPU")
        super().__init__(*args, **kwargs)


class TokenAllocator(TokenToKVPoolAllocator):
    """SGLang's allocator of single tokens; the platform call also passes the page size, which is one."""

    def __init__(self, *args: Any, page_size: int, **kwargs: Any) -> None:
        assert page_size == 1, "defaults.refuse let another page size through"
        super().__init__(*args, **kwargs)
