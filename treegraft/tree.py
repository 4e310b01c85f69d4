"""The shared draft tree: one type over flat arrays, grown by any number of drafters, never shrunk by a graft.

Node 0 is the root: the last committed token, which the target has not processed yet. A parent's index is always
smaller than its child's, so index order is a topological order. The tree knows nothing of models or text.
"""

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]

NOT_PROCESSED = -1


class DraftTree:
    """One decoding step's draft tree.

    Flat arrays, valid in ``[:size]``:

    * ``token`` int64 [n], ``parent`` int64 [n] (root: 0), ``depth`` int64 [n] (root: 0), ``layer`` int64 [n] (the layer
      that added the node; root: 0), ``source`` int64 [n] (index of the drafter that proposed it first; root: -1)
    * ``edge`` float64 [n]: log-probability of the node's token given its parent; ``scorer`` int64 [n]: the drafter it
      is from; ``score`` float64 [n]: sum of ``edge`` along the path, hence never above the parent's score
    * ``ancestors`` bool [n, n]: row i marks node i and all nodes on its path
    * ``expanded`` bool [m, n]: drafter j has proposed children here; ``row`` int64 [m, n]: where drafter j keeps what
      it computed at the node, ``NOT_PROCESSED`` where it has not been there
    * ``frontier`` int64 [<= k]: the nodes that the next skip expands, best first
    """

    def __init__(self, root_token: int, drafters: int, capacity: int = 64) -> None:
        self.drafters = drafters
        self.size = 1
        self._allocate(capacity)
        self.token[0] = root_token
        self.source[0] = self.scorer[0] = -1
        self.ancestors[0, 0] = True
        self.frontier: IntArray = np.zeros(1, np.int64)

    def _allocate(self, capacity: int) -> None:
        self.capacity = capacity
        self.token = np.zeros(capacity, np.int64)
        self.parent = np.zeros(capacity, np.int64)
        self.depth = np.zeros(capacity, np.int64)
        self.layer = np.zeros(capacity, np.int64)
        self.source = np.zeros(capacity, np.int64)
        self.scorer = np.zeros(capacity, np.int64)
        self.edge = np.zeros(capacity, np.float64)
        self.score = np.zeros(capacity, np.float64)
        self.ancestors = np.zeros((capacity, capacity), np.bool_)
        self.expanded = np.zeros((self.drafters, capacity), np.bool_)
        self.row = np.full((self.drafters, capacity), NOT_PROCESSED, np.int64)

    def _resized(self, capacity: int) -> "DraftTree":
        """A copy with room for ``capacity`` nodes."""
        other = DraftTree.__new__(DraftTree)
        other.drafters, other.size, other.frontier = self.drafters, self.size, self.frontier
        other._allocate(capacity)
        n = self.size
        for name in ("token", "parent", "depth", "layer", "source", "scorer", "edge", "score"):
            getattr(other, name)[:n] = getattr(self, name)[:n]
        other.ancestors[:n, :n] = self.ancestors[:n, :n]
        other.expanded[:, :n] = self.expanded[:, :n]
        other.row[:, :n] = self.row[:, :n]
        return other

    def copy(self) -> "DraftTree":
        """An independent copy (the value system branches over actions)."""
        return self._resized(self.capacity)

    def __len__(self) -> int:
        return self.size

    def add(self, parents: IntArray, tokens: IntArray, edges: FloatArray, source: int, layer: int) -> IntArray:
        """Merge children into the tree; a child that exists already is the same node and keeps its score.

        Args:
            parents: int64 [n] node indices; tokens: int64 [n]; edges: float64 [n] log-probabilities. A (parent, token)
                pair may occur once only.
            source: the proposing drafter; layer: the current layer, from 1.

        Returns:
            int64 [n]: the node of each pair, new or old.
        """
        same = (self.parent[1 : self.size, None] == parents) & (
            self.token[1 : self.size, None] == tokens
        )  # [size-1, n]
        known = same.any(axis=0)
        nodes = np.where(known, same.argmax(axis=0) + 1 if self.size > 1 else 0, 0)
        fresh = np.flatnonzero(~known)
        if len(fresh) == 0:
            return nodes
        nodes[fresh] = np.arange(self.size, self.size + len(fresh))
        self.append(parents[fresh].tolist(), tokens[fresh].tolist(), edges[fresh].tolist(), source, layer)
        return nodes

    def append(self, parents: list[int], tokens: list[int], edges: list[float], source: int, layer: int) -> None:
        """Add nodes that are known to be new, at indices ``size``, ``size + 1``, ...; a parent may be one of them."""
        start, end = self.size, self.size + len(parents)
        if end > self.capacity:
            self.__dict__.update(self._resized(max(end, 2 * self.capacity)).__dict__)
        self.token[start:end] = tokens
        self.parent[start:end] = parents
        self.layer[start:end] = layer
        self.source[start:end] = self.scorer[start:end] = source
        self.edge[start:end] = edges
        self.size = end
        depth, score, ancestors = self.depth, self.score, self.ancestors
        if max(parents, default=0) < start:
            above, new = self.parent[start:end], slice(start, end)
            depth[new] = depth[above] + 1
            score[new] = score[above] + self.edge[new]
            ancestors[new] = ancestors[above]
            np.fill_diagonal(ancestors[new, new], val=True)
            return
        # Paths of a few nodes, each below the one before: nothing to do at once.
        for node, one, edge in zip(range(start, end), parents, edges, strict=True):
            depth[node] = depth[one] + 1
            score[node] = score[one] + edge
            ancestors[node] = ancestors[one]
            ancestors[node, node] = True

    def rescore(self, nodes: IntArray, edges: FloatArray, scorer: int) -> None:
        """Replace edge log-probabilities and renew every path score below them.

        An edge that a stronger drafter (higher index) has scored keeps that drafter's word.
        """
        allowed = self.scorer[nodes] <= scorer
        nodes = nodes[allowed]
        if len(nodes) == 0:
            return
        self.edge[nodes] = edges[allowed]
        self.scorer[nodes] = scorer
        n = self.size
        self.score[:n] = self.ancestors[:n, :n] @ self.edge[:n]

    def best(self, candidates: IntArray, count: int) -> IntArray:
        """The ``count`` candidates (ascending node indices) of highest score, best first, ties by lower index."""
        order = (-self.score[candidates]).argsort(kind="stable")
        return candidates[order[:count]]

    def has_children(self) -> BoolArray:
        """Bool [size]: whether a node has a child."""
        inner = np.zeros(self.size, np.bool_)
        inner[self.parent[1 : self.size]] = True
        return inner

    def path(self, node: int) -> IntArray:
        """Node indices from the root (not included) down to ``node`` (included)."""
        return np.flatnonzero(self.ancestors[node, 1 : self.size]) + 1

    def walk(self, tokens: IntArray) -> IntArray:
        """Nodes (root not included) along ``tokens``, as far as the tree follows them."""
        nodes = []
        at = 0
        for token in tokens.tolist():
            below = np.flatnonzero((self.parent[1 : self.size] == at) & (self.token[1 : self.size] == token))
            if len(below) == 0:
                break
            at = int(below[0]) + 1
            nodes.append(at)
        return np.array(nodes, np.int64)
