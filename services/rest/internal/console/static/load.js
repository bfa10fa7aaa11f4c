// Queues, rates and latencies of the last minutes, as charts or as tables.

import { h, reconcile, setText } from "./dom.js";
import { clock, millis, percent, rate, short, time } from "./format.js";
import { mesh } from "./mesh.js";
import { makeTiles } from "./tiles.js";

const share = (state) => (point) => (point.pages?.total ? (point.pages[state] ?? 0) / point.pages.total : null);
const latency = (field) => ["p50", "p90", "p99"].map((name, at) => [name, (point) => point[field]?.[`${name}_s`], at]);

const CHARTS = [
  ["Tokens a second", rate, [
    ["output", (point) => point.output_tokens_per_second ?? 0, 0],
    ["prompt", (point) => point.prompt_tokens_per_second ?? 0, 1]]],
  ["Time to first token", time, latency("first_token")],
  ["Time between tokens", time, latency("between_tokens")],
  ["Requests a second", rate, [
    ["ended", (point) => point.requests_per_second ?? 0, 0],
    ["failed", (point) => point.failures_per_second ?? 0, 3]]],
  ["Queues", short, [
    ["running", (point) => point.running ?? 0, 0],
    ["queued", (point) => point.queued ?? 0, 1],
    ["held", (point) => point.held ?? 0, 2],
    ["at workers", (point) => point.worker_waiting ?? 0, 3]]],
  ["Prompt tokens to compute", short, [["at workers", (point) => point.worker_queued_tokens ?? 0, 0]]],
  ["Hit rate and goodput", percent, [
    ["hit rate", (point) => point.hit_rate, 0],
    ["goodput", (point) => point.goodput, 1]]],
  ["Pages of all pools", percent, [
    ["used", share("used"), 0], ["cached", share("cached"), 1], ["quarantined", share("quarantined"), 3]]],
];
const HEIGHT = 170;
const TABLE_ROWS = 15;
const BRIDGED_POINTS = 5;
const canDraw = () => typeof window.uPlot === "function";
const dark = window.matchMedia("(prefers-color-scheme: dark)");

function colours() {
  const style = getComputedStyle(document.documentElement);
  const read = (name) => style.getPropertyValue(name).trim();
  return { lines: [0, 1, 2, 3].map((at) => read(`--line-${at}`)), grid: read("--border"), text: read("--muted") };
}

function makePlot(holder, write, series, onCursor) {
  const { lines, grid, text } = colours();
  const axis = { stroke: text, grid: { stroke: grid, width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
  const plot = new window.uPlot({
    width: Math.max(holder.clientWidth, 120),
    height: HEIGHT,
    legend: { show: false },
    padding: [8, 8, 0, 0],
    cursor: { y: false, drag: { setScale: false } },
    hooks: { setCursor: [onCursor] },
    scales: { y: { range: (_, low, high) => [0, Math.max(high ?? 0, 1e-6) * 1.08] } },
    axes: [
      { ...axis, size: 26, space: 60, incrs: [5, 10, 15, 30, 60, 120, 180, 300], values: (_, ticks) => ticks.map((at) => clock(at * 1000).slice(0, 5 + (ticks[1] - ticks[0] < 60 ? 3 : 0))) },
      { ...axis, size: 58, space: 32, values: (_, ticks) => ticks.map(write) },
    ],
    series: [{}, ...series.map(([label, , colour]) => ({
      label, stroke: lines[colour], width: 1.6, points: { show: false },
    }))],
  }, [[], ...series.map(() => [])], holder);
  return plot;
}

/** Values of a series; a pause of a few points is not a gap, which is what null is for uPlot. */
function bridged(points, read) {
  const values = points.map((point) => read(point) ?? null);
  let last = -1;
  values.forEach((value, at) => {
    if (value === null) return;
    if (last >= 0 && at - last <= BRIDGED_POINTS) values.fill(undefined, last + 1, at);
    last = at;
  });
  return values;
}

function makeChart([title, write, series]) {
  const holder = h("div", { class: "plot", "aria-hidden": "true" });
  const values = series.map(([name, , colour]) => {
    const value = h("span", { class: "value" });
    return { value, item: h("li", {}, h("i", { class: `key line colour-${colour}`, "aria-hidden": "true" }), `${name} `, value) };
  });
  const body = h("tbody");
  const table = h("div", { class: "scroll", hidden: true }, h("table", {},
    h("caption", { class: "hidden" }, title),
    h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "time"), series.map(([name]) => h("th", { scope: "col", class: "number" }, name)))),
    body));
  const figure = h("figure", { class: "panel chart" },
    h("figcaption", {}, h("h2", {}, title), h("ul", { class: "legend" }, values.map(({ item }) => item))), holder, table);
  let plot = null;
  let points = [];

  /** Writes the values under the pointer, or else the newest ones. */
  function showValues() {
    const shown = plot?.cursor.idx ?? points.length - 1;
    series.forEach(([, read], index) => {
      let value = points[shown] && read(points[shown]);
      if (value === undefined && shown === points.length - 1) {
        value = points.map(read).findLast((one) => one !== undefined && one !== null);
      }
      setText(values[index].value, value === undefined || value === null ? "–" : write(value));
    });
  }

  figure.show = (given, isTable) => {
    points = given;
    showValues();
    holder.hidden = isTable;
    table.hidden = !isTable;
    if (isTable) {
      reconcile(body, points.slice(-TABLE_ROWS).reverse(), (point) => point.time,
        (point) => h("tr", {}, h("td", {}, clock(millis(point.time))), series.map(([, read]) => {
          const value = read(point);
          return h("td", { class: "number" }, value === undefined || value === null ? "–" : write(value));
        })), () => {});
      return;
    }
    plot ??= makePlot(holder, write, series, showValues);
    const width = Math.max(holder.clientWidth, 120);
    if (width !== plot.width) plot.setSize({ width, height: HEIGHT });
    plot.setData([points.map((point) => millis(point.time) / 1000),
      ...series.map(([, read]) => bridged(points, read))]);
  };
  figure.forget = () => {
    plot?.destroy();
    plot = null;
  };
  return figure;
}

export function showLoad(section) {
  const tiles = makeTiles();
  const charts = CHARTS.map(makeChart);
  const minutes = h("select", {}, [2, 5, 10].map((value) => h("option", { value, selected: value === 5 }, `${value} min`)));
  const asTable = h("input", { type: "checkbox" });
  const missing = h("p", { class: "note" }, "The chart library could not be loaded: tables are shown instead.");
  section.append(
    h("div", { class: "heading" }, h("h1", { id: "load-title" }, "Load"),
      h("p", { class: "muted summary" }, "As this gateway sees it, every two seconds"),
      h("label", { class: "inline" }, "Last ", minutes),
      h("label", { class: "inline" }, asTable, " as tables")),
    missing, tiles, h("div", { class: "charts" }, charts));
  missing.hidden = canDraw();

  function update() {
    if (section.hidden) return;
    tiles.show();
    const from = Date.now() - Number(minutes.value) * 60000;
    const newest = mesh.points.length ? millis(mesh.points.at(-1).time) : 0;
    const since = Math.min(from, newest - Number(minutes.value) * 60000 + 1);
    const points = mesh.points.filter((point) => millis(point.time) >= since);
    const isTable = asTable.checked || !canDraw();
    for (const chart of charts) chart.show(points, isTable);
  }
  const redraw = () => {
    for (const chart of charts) chart.forget();
    update();
  };
  minutes.addEventListener("change", update);
  asTable.addEventListener("change", update);
  dark.addEventListener("change", redraw);
  new ResizeObserver(update).observe(section);
  return { update };
}
