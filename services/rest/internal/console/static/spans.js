// Spans of several services as one tree, as `weft trace` builds it.

import { millis, seconds } from "./format.js";

// A child that begins so much before its parent, or after its end, is of another clock.
const TOLERANCE_S = 0.001;

function build(span, children, shift) {
  const node = { span, start: millis(span.start_time) / 1000 + fraction(span.start_time) + shift, took: seconds(span.duration), isShifted: false, children: [] };
  for (const child of children.get(span.span_id) ?? []) {
    const isSame = child.service === span.service && child.instance === span.instance;
    const start = millis(child.start_time) / 1000 + fraction(child.start_time) + shift;
    const isOutside = start < node.start - TOLERANCE_S || start > node.start + node.took + TOLERANCE_S;
    // Clocks of two services may differ: then the child goes to its parent's middle, so that the
    // delay is the same in both directions.
    const moved = isOutside && !isSame
      ? shift + node.start + Math.max(0, node.took - seconds(child.duration)) / 2 - start
      : shift;
    const below = build(child, children, moved);
    below.isShifted = moved !== shift;
    node.children.push(below);
  }
  node.children.sort((a, b) => a.start - b.start);
  return node;
}

/** What Date drops of a time: all below a millisecond, in seconds. */
function fraction(timestamp) {
  const digits = /\.(\d+)Z$/.exec(timestamp ?? "")?.[1] ?? "";
  return digits.length > 3 ? Number(`0.000${digits.slice(3)}`) : 0;
}

/** Rows of a waterfall, parents before children, with depth and start after the first one's. */
export function rowsOf(spans) {
  const known = new Map(spans.map((span) => [span.span_id, span]));
  const children = new Map();
  const roots = [];
  for (const span of known.values()) {
    if (span.parent_span_id && known.has(span.parent_span_id) && span.parent_span_id !== span.span_id) {
      children.set(span.parent_span_id, [...(children.get(span.parent_span_id) ?? []), span]);
    } else roots.push(span);
  }
  const trees = roots.map((span) => build(span, children, 0)).sort((a, b) => a.start - b.start);
  if (!trees.length) return { rows: [], total: 0 };
  const zero = trees[0].start;
  const rows = [];
  const add = (node, depth) => {
    rows.push({ span: node.span, depth, after: node.start - zero, took: node.took, isShifted: node.isShifted });
    for (const child of node.children) add(child, depth + 1);
  };
  for (const tree of trees) add(tree, 0);
  return { rows, total: Math.max(...rows.map((row) => row.after + row.took), 1e-6) };
}
