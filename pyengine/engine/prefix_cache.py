"""Which blocks hold the KV of which tokens: automatic prefix caching by chained content hashes."""

from __future__ import annotations

from collections.abc import Callable

from pyengine.engine.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent

#: hash of a block: (hash of the block before it, its own tokens) -> any integer. Need not be free of collisions.
HashFunction = Callable[[int, tuple[int, ...]], int]
#: tokens [start, end) of a sequence
TokenSlice = Callable[[int, int], list[int]]


def hash_block(parent_hash: int, token_ids: tuple[int, ...]) -> int:
    """Python's own tuple hash. Fast; a collision costs a miss and never a wrong hit, because content is compared."""
    return hash((parent_hash, token_ids))


class CachedBlock:
    """One block's worth of tokens after a certain prefix.

    It stands for content, not for a place: `block_id` is where the KV lies now, None while it lies nowhere. It lives on without
    a block as long as something continues it (`num_refs`), so that the chain behind it is found again once this content is
    computed anew. Two entries are the same content exactly if they are the same object.
    """

    __slots__ = ("block_hash", "block_id", "num_refs", "parent", "salt", "token_ids")

    def __init__(self, block_hash: int, parent: CachedBlock | None, token_ids: tuple[int, ...], salt: str | None) -> None:
        self.block_hash = block_hash
        self.parent = parent  # None: a root, which stands for a salt and no tokens
        self.token_ids = token_ids
        self.salt = salt  # of its root
        self.block_id: int | None = None
        self.num_refs = 0  # entries that continue this one, and live sequences whose last full block this is


class PrefixCache:
    """Full blocks by content.

    A block's hash covers its tokens, all tokens before it, and the salt at the chain's root. A lookup goes from the root block
    by block, and takes an entry only if its parent is the very entry found before it and its tokens are the same, so that by
    induction the whole prefix is the same whatever the hash function does.

    The cache knows block ids and nothing of who holds them; `BlockManager` tells it when a block's content is complete
    (`insert`), and when a free block is taken for something else (`evict`).
    """

    def __init__(self, block_size: int, hash_function: HashFunction = hash_block) -> None:
        self.block_size = block_size
        self._hash = hash_function
        self._entries: dict[int, CachedBlock] = {}  # by hash
        self._roots: dict[str | None, CachedBlock] = {}  # by salt
        self._by_block: dict[int, CachedBlock] = {}
        self._events: list[KVEvent] | None = None  # since they were taken last; None: nobody wants to know

    def __contains__(self, block_id: int) -> bool:
        """Whether the block's content can be found."""
        return block_id in self._by_block

    def __len__(self) -> int:
        return len(self._by_block)

    def match(self, salt: str | None, token_slice: TokenSlice, max_blocks: int) -> list[CachedBlock]:
        """The longest run of cached blocks that the sequence starts with, `max_blocks` at most."""
        matched: list[CachedBlock] = []
        parent = self._roots.get(salt)
        size = self.block_size
        while parent is not None and len(matched) < max_blocks:
            start = len(matched) * size
            token_ids = tuple(token_slice(start, start + size))
            entry = self._entries.get(self._hash(parent.block_hash, token_ids))
            if entry is None or entry.block_id is None or entry.parent is not parent or entry.token_ids != token_ids:
                break
            matched.append(entry)
            parent = entry
        return matched

    def root(self, salt: str | None) -> CachedBlock | None:
        """Where the chains of a salt start; None while nobody holds any."""
        return self._roots.get(salt)

    def hold_root(self, salt: str | None) -> CachedBlock:
        """Where a sequence's chain starts, held for it as by `hold`."""
        root = self._roots.get(salt)
        if root is None:
            root = self._roots[salt] = CachedBlock(hash(salt), None, (), salt)
        root.num_refs += 1
        return root

    def hold(self, tip: CachedBlock) -> CachedBlock:
        """Keep an entry alive as the tip of a sequence's chain, until `drop` or a successful `insert` after it."""
        tip.num_refs += 1
        return tip

    def drop(self, tip: CachedBlock) -> None:
        """Undo a `hold`."""
        tip.num_refs -= 1
        self._forget_unused(tip)

    def insert(self, tip: CachedBlock, token_ids: tuple[int, ...], block_id: int) -> CachedBlock | None:
        """Enter a block whose KV is complete, after a held `tip`. Content that is cached elsewhere already stays there.

        Returns:
            The new tip, held instead of the old one; or None where another content has the same hash: this block cannot be
            cached, nor what follows it, and the old tip stays held.
        """
        block_hash = self._hash(tip.block_hash, token_ids)
        entry = self._entries.get(block_hash)
        if entry is None:
            entry = self._entries[block_hash] = CachedBlock(block_hash, tip, token_ids, tip.salt)
            tip.num_refs += 1
        elif entry.parent is not tip or entry.token_ids != token_ids:
            return None
        self.adopt(entry, block_id)
        entry.num_refs += 1
        tip.num_refs -= 1  # not its last reference: `entry` continues it
        return entry

    def adopt(self, entry: CachedBlock, block_id: int) -> None:
        """Let a block that holds the entry's content stand for it, if no block does."""
        if entry.block_id is None:
            entry.block_id = block_id
            self._by_block[block_id] = entry
            if self._events is not None:
                self._events.append(_stored(entry))

    def evict(self, block_id: int) -> None:
        """The block is about to be overwritten."""
        entry = self._by_block.pop(block_id, None)
        if entry is not None:
            entry.block_id = None
            if self._events is not None:
                self._events.append(BlockRemoved(entry.block_hash))
            self._forget_unused(entry)

    def reset(self) -> None:
        """Forget everything. Tips that sequences hold are void: they must be let go without `drop`."""
        self._entries.clear()
        self._roots.clear()
        self._by_block.clear()
        if self._events is not None:
            self._events.append(AllBlocksCleared())

    # ---- for listeners

    def record_events(self, on: bool) -> None:
        """Whether `take_events` is to have what happens from now on."""
        if on != (self._events is not None):
            self._events = [] if on else None

    def take_events(self) -> list[KVEvent]:
        """What happened since the last call, in order."""
        events = self._events
        if not events:
            return []
        self._events = []
        return events

    def stored_blocks(self) -> list[BlockStored]:
        """Everything that can be found now, parents before children: an entry is made only after its parent."""
        return [_stored(entry) for entry in self._entries.values() if entry.block_id is not None]

    def _forget_unused(self, entry: CachedBlock) -> None:
        while entry.num_refs == 0 and entry.block_id is None:
            parent = entry.parent
            if parent is None:
                del self._roots[entry.salt]
                return
            del self._entries[entry.block_hash]
            parent.num_refs -= 1
            entry = parent


def _stored(entry: CachedBlock) -> BlockStored:
    parent = entry.parent
    assert parent is not None  # roots hold no tokens
    parent_hash = None if parent.parent is None else parent.block_hash
    return BlockStored(entry.block_hash, parent_hash, entry.token_ids, entry.salt)
