// The last requests, and one request's timeline across services.

import { h, reconcile, refresh, setAttribute, setText } from "./dom.js";
import { brief, clock, count, millis, rate, seconds, time } from "./format.js";
import { mesh } from "./mesh.js";
import { MAX_CALLS, failure, meshHeaders } from "./session.js";
import { rowsOf } from "./spans.js";

const COLUMNS = ["began", "request", "model", "worker", "outcome", "TTFT", "took", "prompt", "cached", "output", "tok/s"];
const NUMBERS = 5;
const TICKS = 5;

function outcomeKind(outcome) {
  if (outcome === "ok") return "good";
  return ["waiting", "running", "cancelled"].includes(outcome) ? "" : "bad";
}

function makeRow(open) {
  const cells = COLUMNS.map((_, at) => h("td", at >= NUMBERS ? { class: "number" } : {}));
  const link = h("button", { type: "button", class: "link mono" });
  cells[1].append(link);
  const row = h("tr", {}, cells);
  row.cells_ = cells;
  row.link = link;
  row.addEventListener("click", () => open(row.requestId));
  return row;
}

function updateRow(row, request, openId) {
  const took = seconds(request.duration);
  const first = request.first_token ? seconds(request.first_token) : undefined;
  const output = request.output_tokens ?? 0;
  const pace = first !== undefined && output > 1 && took > first ? (output - 1) / (took - first) : undefined;
  row.requestId = request.request_id;
  setText(row.link, brief(request.request_id, 20));
  setAttribute(row.link, "title", request.request_id);
  setAttribute(row, "aria-current", request.request_id === openId);
  const lost = request.lost_attempts ? `, ${request.lost_attempts} lost` : "";
  const texts = [clock(millis(request.arrival_time)), null, request.model, request.worker_id ?? "–",
    `${request.outcome}${lost}`, time(first), time(took), count(request.prompt_tokens),
    count(request.cached_tokens), count(output), pace === undefined ? "–" : rate(pace)];
  texts.forEach((text, at) => {
    if (text !== null) setText(row.cells_[at], text ?? "");
  });
  row.cells_[4].className = `outcome ${outcomeKind(request.outcome)}`;
}

function waterfallRow(row, total, number) {
  const { span } = row;
  const attributes = Object.entries(span.attributes ?? {});
  const details = h("tr", { class: "details", hidden: true, id: `span-${number}` },
    h("td", { colspan: 4 }, h("dl", { class: "facts" },
      span.error && h("div", {}, h("dt", {}, "error"), h("dd", { class: "bad" }, span.error)),
      attributes.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, String(value)))),
      !attributes.length && !span.error && h("div", {}, h("dt", {}, "no attributes")))));
  const name = h("button", {
    type: "button", class: "link", "aria-expanded": "false", "aria-controls": `span-${number}`,
    onclick: () => {
      details.hidden = !details.hidden;
      setAttribute(name, "aria-expanded", String(!details.hidden));
    },
  }, span.name ?? "");
  const bar = h("span", { class: `bar ${span.service ?? ""}${span.error ? " failed" : ""}` });
  bar.style.insetInlineStart = `${(100 * Math.max(0, row.after)) / total}%`;
  bar.style.inlineSize = `max(2px, ${(100 * row.took) / total}%)`;
  const cell = h("td", {}, name);
  cell.style.paddingInlineStart = `${8 + 14 * row.depth}px`;
  return [h("tr", {}, cell,
    h("td", { class: "muted" }, span.instance || span.service || ""),
    h("td", { class: "track" }, bar, h("span", { class: "hidden" }, `begins after ${time(row.after)}`)),
    h("td", { class: "number", title: row.isShifted ? "The clocks of the two services differ; its beginning is estimated." : null },
      `${row.isShifted ? "~" : ""}${time(row.took)}`)), details];
}

function waterfall(spans, silent) {
  const { rows, total } = rowsOf(spans);
  const ticks = Array.from({ length: TICKS }, (_, at) => {
    const tick = h("span", {}, time((total * at) / (TICKS - 1)));
    tick.style.insetInlineStart = `${(100 * at) / (TICKS - 1)}%`;
    return tick;
  });
  const services = [...new Set(rows.map((row) => row.span.service))];
  return [
    silent.map((one) => h("p", { class: "note" }, `${one.address} does not answer: ${one.problem}`)),
    h("ul", { class: "legend" }, services.map((name) => h("li", {}, h("i", { class: `key bar ${name}`, "aria-hidden": "true" }), name))),
    h("div", { class: "scroll" }, h("table", { class: "waterfall" },
      h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "span"), h("th", { scope: "col" }, "service"),
        h("th", { scope: "col", class: "axis" }, h("span", { class: "hidden" }, "timeline"), ticks),
        h("th", { scope: "col", class: "number" }, "took"))),
      h("tbody", {}, rows.flatMap((row, at) => waterfallRow(row, total, at))))),
  ];
}

export function showRequests(section) {
  const body = h("tbody");
  const filter = h("input", { type: "search", placeholder: "id, model, worker, outcome", "aria-label": "Filter requests" });
  const pause = h("input", { type: "checkbox" });
  const number = h("p", { class: "muted summary" });
  const title = h("h2", {}, "Timeline");
  const detail = h("div", {}, h("p", { class: "muted" }, "Choose a request to see what it did in each service."));
  const trace = h("section", { class: "panel", "aria-live": "polite", "aria-label": "Timeline of a request" }, title, detail);
  let openId = "";

  section.append(
    h("div", { class: "heading" }, h("h1", { id: "requests-title" }, "Requests"), number,
      h("label", { class: "inline" }, filter), h("label", { class: "inline" }, pause, " pause")),
    h("div", { class: "panel scroll requests" }, h("table", { class: "rows" },
      h("thead", {}, h("tr", {}, COLUMNS.map((name, at) => h("th", { scope: "col", class: at >= NUMBERS ? "number" : null }, name)))),
      body)),
    trace);

  async function load(id) {
    setText(title, `Timeline of ${id}`);
    try {
      const { spans = [], silent = [], gateway_id: gateway } = await ask(id);
      if (id !== openId) return;
      const other = isOther(gateway)
        ? [h("p", { class: "note" }, `Answered by ${gateway}, which lacks the spans of other gateways. Choose the request again to ask once more.`)]
        : [];
      if (!spans.length) {
        detail.replaceChildren(...other, h("p", { class: "note" }, "No spans: the request is too long ago, unknown here, or the services run with --no-tracing."));
        return;
      }
      detail.replaceChildren(...other, ...waterfall(spans, silent).flat());
    } catch (error) {
      if (id === openId) detail.replaceChildren(h("p", { class: "note bad" }, error.message));
    }
  }

  /** Whether another gateway has answered than the one that the page shows. */
  const isOther = (gateway) => Boolean(gateway && mesh.now && gateway !== mesh.now.gateway_id);

  /** The spans of a request, of the gateway that the page shows if that one answers. */
  async function ask(id) {
    for (let calls = 1; ; calls += 1) {
      const response = await fetch(`/mesh/spans?id=${encodeURIComponent(id)}`, { headers: meshHeaders() });
      if (!response.ok) throw await failure(response);
      const answer = await response.json();
      if (!isOther(answer.gateway_id) || calls === MAX_CALLS || id !== openId) return answer;
    }
  }

  const choose = (id) => {
    if (id === openId) load(id);
    location.hash = `#requests/${encodeURIComponent(id)}`;
  };

  function update(isForced = false) {
    if (!mesh.now || (pause.checked && !isForced && body.children.length)) return;
    // Rows must not move away under a pointer or the focus.
    const isHeld = body.matches(":hover") || body.contains(document.activeElement);
    const wanted = filter.value.trim().toLowerCase();
    const all = [...mesh.now.running_requests].reverse().concat([...mesh.ended].reverse());
    const shown = all.filter((one) => !wanted || [one.request_id, one.trace_id, one.model, one.worker_id, one.outcome]
      .some((text) => text?.toLowerCase().includes(wanted)));
    setText(number, `${count(mesh.now.running_requests.length)} at the gateway, the last ${count(mesh.ended.length)} that ended`);
    const keyOf = (one) => one.request_id;
    const draw = (row, one) => updateRow(row, one, openId);
    if (isHeld && !isForced && body.children.length) refresh(body, shown, keyOf, draw);
    else reconcile(body, shown, keyOf, () => makeRow(choose), draw);
  }
  filter.addEventListener("input", () => update(true));

  return {
    update,
    open(id) {
      if (!id || id === openId) return;
      openId = id;
      for (const row of body.children) setAttribute(row, "aria-current", row.requestId === id);
      load(id);
    },
  };
}
