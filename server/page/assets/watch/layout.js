// Where the nodes of the tree stand: depth by tokens (their square root), breadth by leaves. O(nodes), and
// stable: children keep the order in which their first descendants were seen, whatever is split or
// evicted beside them.

export const LEAF = 20; // world units between two leaves
const SHORTEST = 12;
const PER_ROOT = 14;

/** Sets `depth`, `breadth`, `children`, `numLeaves` of each node; returns {depth, breadth} of all. */
export function layOut(nodes) {
  const roots = [];
  for (const node of nodes.values()) node.children = [];
  for (const node of nodes.values()) {
    const parent = nodes.get(node.parent);
    if (parent) parent.children.push(node);
    else roots.push(node);
  }
  const order = parentsFirst(roots);
  for (let i = order.length - 1; i >= 0; i--) {
    const node = order[i];
    node.order = node.children.reduce((least, child) => Math.min(least, child.order), node.sequence);
    node.numLeaves = node.children.reduce((sum, child) => sum + child.numLeaves, 0) || 1;
    node.children.sort((a, b) => a.order - b.order);
  }
  roots.sort((a, b) => a.order - b.order);
  let deepest = 1;
  let next = 0;
  for (const root of roots) {
    place(root, next);
    next += root.numLeaves;
  }
  for (const node of order) deepest = Math.max(deepest, node.depth);
  return { roots, order, depth: deepest, breadth: Math.max(1, next) * LEAF };
}

/** How long an edge is drawn. */
export const lengthOf = (tokens) => (tokens ? SHORTEST + PER_ROOT * Math.sqrt(tokens) : 0);

function parentsFirst(roots) {
  const order = [...roots];
  for (let i = 0; i < order.length; i++) order.push(...order[i].children);
  return order;
}

function place(root, firstLeaf) {
  root.depth = 0;
  root.breadth = (firstLeaf + root.numLeaves / 2) * LEAF;
  root.firstLeaf = firstLeaf;
  const stack = [root];
  while (stack.length) {
    const node = stack.pop();
    let leaf = node.firstLeaf;
    for (const child of node.children) {
      child.firstLeaf = leaf;
      child.depth = node.depth + lengthOf(child.tokens);
      child.breadth = (leaf + child.numLeaves / 2) * LEAF;
      leaf += child.numLeaves;
      stack.push(child);
    }
  }
}
