// The figures that matter most, each with its last minutes as a line.

import { h, setAttribute, setText, svg } from "./dom.js";
import { percent, rate, short, time } from "./format.js";
import { mesh } from "./mesh.js";

const WIDTH = 96;
const HEIGHT = 22;
const SHOWN = 60;

/** Share of the pools' pages that are in use. */
export const pagesUsed = (point) =>
  point.pages?.total ? (point.pages.used ?? 0) / point.pages.total : undefined;

const TILES = [
  ["Output", (point) => point.output_tokens_per_second ?? 0, (value) => `${short(value)} tok/s`],
  ["Requests", (point) => point.requests_per_second ?? 0, (value) => `${rate(value)} /s`],
  ["TTFT, median", (point) => point.first_token?.p50_s, time],
  ["ITL, median", (point) => point.between_tokens?.p50_s, time],
  ["Running", (point) => point.running ?? 0, short],
  ["Waiting", (point) => (point.queued ?? 0) + (point.held ?? 0) + (point.worker_waiting ?? 0), short],
  ["Hit rate", (point) => point.hit_rate, percent],
  ["Goodput", (point) => point.goodput, percent],
  ["Pages used", pagesUsed, percent],
];

function sparkline(values) {
  const known = values.filter((value) => value !== undefined);
  const top = Math.max(...known, 1e-9);
  const step = WIDTH / (SHOWN - 1);
  let path = "";
  let isBroken = true;
  values.forEach((value, at) => {
    if (value === undefined) { isBroken = true; return; }
    const x = WIDTH - (values.length - 1 - at) * step;
    const y = HEIGHT - 1.5 - (value / top) * (HEIGHT - 3);
    path += `${isBroken ? "M" : "L"}${x.toFixed(1)},${y.toFixed(1)}`;
    isBroken = false;
  });
  return path;
}

export function makeTiles() {
  const tiles = TILES.map(([name]) => {
    const value = h("dd", {});
    const path = svg("path", { fill: "none" });
    const line = svg("svg", { class: "spark", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" }, path);
    return { element: h("div", { class: "tile" }, h("dt", {}, name), value, line), value, path };
  });
  const element = h("dl", { class: "tiles", "aria-label": "Now" }, tiles.map((tile) => tile.element));
  element.show = () => {
    const points = mesh.points.slice(-SHOWN);
    TILES.forEach(([, read, write], at) => {
      const values = points.map(read);
      // A latency of a moment without tokens is that of the last one with some.
      const last = values.findLast((value) => value !== undefined);
      setText(tiles[at].value, last === undefined ? "–" : write(last));
      setAttribute(tiles[at].path, "d", sparkline(values));
    });
  };
  return element;
}
