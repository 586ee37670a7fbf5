"""The identifiers that travel through every room."""

from typing import NewType

WorkerId = NewType("WorkerId", str)
"""A worker's name in one gateway: its URL, normalised (`grpc://127.0.0.1:51000`)."""

Rank = NewType("Rank", int)
"""A data-parallel member of a worker, from 0."""

RequestId = NewType("RequestId", str)
"""One generation request, unique among those alive on a worker."""

OrderId = NewType("OrderId", str)
"""One order (flush, profile, state) to every rank of an engine."""

EngineHash = NewType("EngineHash", int)
"""A block's hash as its engine names it: unsigned, 64 bits."""

BlockName = NewType("BlockName", str)
"""A block's name in a store that several engines share: 32 hexadecimal digits, of all that its bytes depend on."""

PrefixHash = NewType("PrefixHash", int)
"""kvherd's own chained hash of a prefix that ends at a block boundary: unsigned, 64 bits."""

Epoch = NewType("Epoch", str)
"""One life of a publisher of KV events: 32 hexadecimal digits."""
