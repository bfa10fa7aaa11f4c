// The fleet as a live picture: members in lanes, what moves between them.

import { h, reconcile, setAttribute, setText, svg } from "./dom.js";
import { bytes, count, percent, rate, role, seconds, short, time } from "./format.js";
import { mesh } from "./mesh.js";
import { openMember } from "./member.js";
import { makePlans } from "./plans.js";
import { makeTiles } from "./tiles.js";

const LANES = [
  ["gateway", "Gateway", ["gateway"]],
  ["decode", "Decode", ["decode", "both"]],
  ["fillers", "Prefill and stores", ["prefill", "kvstore"]],
];
const PAGE_STATES = ["used", "cached", "quarantined"];
const MANY = 12;
const FLOWS = {
  FLOW_KIND_REQUESTS: ["requests", "Requests"],
  FLOW_KIND_PAGES: ["pages", "Pages filled"],
  FLOW_KIND_PUTS: ["puts", "Pages stored"],
};
const LABELLED_FLOWS = 8;
const DENSE_FLOWS = 60;
const OPEN_FLOWS = 24;
const LOOP = 44;

/** A bar of a pool's pages, with the same in words. */
export function pageBar() {
  const parts = PAGE_STATES.map((state) => h("span", { class: `part ${state}` }));
  const bar = h("div", { class: "pages", role: "img" }, parts);
  bar.show = (pages) => {
    const total = pages?.total ?? 0;
    const words = PAGE_STATES.map((state) => `${percent(total ? (pages[state] ?? 0) / total : 0)} ${state}`);
    PAGE_STATES.forEach((state, at) => {
      parts[at].style.inlineSize = total ? `${(100 * (pages[state] ?? 0)) / total}%` : "0";
    });
    setAttribute(bar, "aria-label", total ? `${count(total)} pages: ${words.join(", ")}` : "no pages known");
    setAttribute(bar, "title", bar.getAttribute("aria-label"));
  };
  return bar;
}

/** What a member's health is, in a word and as a class. */
export function health(member) {
  if (member.start) return ["starting", "warn"];
  if (member.draining) return ["draining", "warn"];
  return member.healthy ? ["ok", "good"] : ["not ok", "bad"];
}

function makeCard(member) {
  const parts = {
    name: h("span", { class: "name" }),
    state: h("span", { class: "state" }),
    brief: h("span", { class: "brief muted" }),
    role: h("span", { class: "muted role" }),
    bar: pageBar(),
    numbers: h("span", { class: "numbers" }),
    problem: h("span", { class: "problem" }),
  };
  const card = h("button", { type: "button", class: "member", "aria-haspopup": "dialog" },
    h("span", { class: "line" }, parts.name, parts.role, parts.state, parts.brief),
    parts.bar, parts.numbers, parts.problem);
  card.parts = parts;
  card.addEventListener("click", () => openMember(card.memberId));
  return card;
}

function numbers(member, kind) {
  if (kind === "kvstore") return [`${short(member.filling_requests)} fills`, `hit ${percent(member.hit_rate)}`];
  const found = [`${short(member.running_requests)} run`, `${short(member.waiting_requests)} wait`];
  if (kind === "gateway") return found;
  if (member.filling_requests) found.push(`${short(member.filling_requests)} fill`);
  const speed = kind === "prefill" ? member.prefill_tokens_per_second : member.decode_tokens_per_second;
  // Decode workers' 0 is left out of the message; prefill workers may not know theirs.
  if (kind !== "prefill" || speed !== undefined) found.push(`${short(speed)} tok/s`);
  if (member.hit_rate !== undefined) found.push(`hit ${percent(member.hit_rate)}`);
  return found;
}

function updateCard(card, member) {
  const { parts } = card;
  const [word, kind] = health(member);
  const is = role(member);
  card.memberId = member.member_id;
  card.className = `member ${kind}`;
  setText(parts.name, member.member_id);
  setAttribute(parts.name, "title", member.member_id);
  setText(parts.role, member.member_id.startsWith(is) ? "" : is);
  setText(parts.state, word === "ok" ? "" : word);
  parts.bar.show(member.pages);
  const texts = numbers(member, is);
  setText(parts.brief, word === "ok" ? texts[0] : "");
  reconcile(parts.numbers, texts.map((text, at) => ({ at, text })), ({ at }) => at,
    () => h("span", {}), (element, { text }) => setText(element, text));
  setText(parts.problem, member.healthy ? "" : member.problem ?? "");
  parts.problem.hidden = member.healthy || !member.problem;
  setAttribute(parts.problem, "title", member.problem);
}

const order = new Intl.Collator("en", { numeric: true });

function makeLanes() {
  const lanes = LANES.map(([name, title]) => {
    const list = h("div", { class: "cards" });
    const number = h("span", { class: "muted" });
    const lane = h("div", { class: `lane ${name}`, role: "group", "aria-label": title },
      h("h2", {}, title, " ", number), list);
    return { lane, list, number };
  });
  const curves = svg("g", {});
  const sums = svg("g", {});
  const edges = svg("svg", { class: "edges", "aria-hidden": "true" }, curves, sums);
  const picture = h("div", { class: "picture" }, edges, lanes.map(({ lane }) => lane));
  return { picture, lanes, edges, curves, sums };
}

const total = (flows, field) => flows.reduce((sum, flow) => sum + (flow[field] ?? 0), 0);

/** What moves between two lanes, over all their members: lines of text for the gap. */
function sumsOf(flows) {
  const of = (kind) => flows.filter((flow) => flow.kind === kind);
  const [requests, pages, puts] = Object.keys(FLOWS).map(of);
  const tokens = total(requests, "tokens_per_second");
  const moved = total(pages, "bytes_per_second");
  const stored = total(puts, "pages_per_second");
  return [
    [["requests", requests.length && `${rate(total(requests, "per_second"))} req/s →`],
      ["requests", tokens && `← ${short(tokens)} tok/s`]],
    [["pages", (moved || total(pages, "pages_per_second")) && `← ${moved ? `${bytes(moved)}/s` : `${rate(total(pages, "pages_per_second"))} pages/s`}`],
      ["puts", stored && `${rate(stored)} pages/s →`]],
  ].map((lines) => lines.filter(([, text]) => text));
}

function flowText(flow) {
  if (flow.kind === "FLOW_KIND_REQUESTS") {
    const tokens = flow.tokens_per_second ? ` · ${short(flow.tokens_per_second)} tok/s` : "";
    return flow.per_second || flow.open ? `${rate(flow.per_second)} req/s${tokens}` : "";
  }
  if (flow.bytes_per_second) return `${bytes(flow.bytes_per_second)}/s`;
  return flow.pages_per_second ? `${rate(flow.pages_per_second)} pages/s` : "";
}

const strength = (flow) => Math.log10(1 + 10 * (flow.pages_per_second || flow.per_second || 0) + (flow.open ?? 0));

/** Draws a curve from card to card for each flow. With few flows each has its label, with many those
 * of the member that the pointer or the focus is on. */
function drawEdges({ picture, edges, lanes, curves, sums }, flows) {
  const frame = picture.getBoundingClientRect();
  setAttribute(edges, "viewBox", `0 0 ${frame.width} ${frame.height}`);
  const cards = new Map();
  for (const { list } of lanes) {
    for (const card of list.children) cards.set(card.memberId, card.getBoundingClientRect());
  }
  const drawn = flows.filter((flow) => cards.has(flow.source_id) && cards.has(flow.target_id));
  const chosen = picture.querySelector(".member:hover, .member:focus-visible")?.memberId;
  const isOf = (flow) => flow.source_id === chosen || flow.target_id === chosen;
  const isLabelled = (flow) => (chosen ? isOf(flow) : drawn.length <= LABELLED_FLOWS);
  const boxes = lanes.map(({ lane }) => lane.getBoundingClientRect());
  const lines = sumsOf(drawn).flatMap((texts, gap) => texts.map(([kind, text], row) => ({ gap, kind, text, row })));
  reconcile(sums, lines, ({ gap, row }) => `${gap} ${row}`,
    () => svg("text", { "text-anchor": "middle" }),
    (label, { gap, kind, text, row }) => {
      setAttribute(label, "class", `edge-sum ${kind}`);
      setAttribute(label, "x", (boxes[gap].right + boxes[gap + 1].left) / 2 - frame.left);
      setAttribute(label, "y", 14 + 15 * row);
      setText(label, text);
    });
  setAttribute(edges, "class", drawn.length > DENSE_FLOWS ? "edges dense" : "edges");
  reconcile(curves, drawn, (flow) => `${flow.kind} ${flow.source_id} ${flow.target_id}`,
    (flow) => {
      const kind = FLOWS[flow.kind]?.[0] ?? "requests";
      const path = svg("path", { class: "edge", fill: "none" });
      const label = svg("text", { class: "edge-label", "text-anchor": "middle" });
      const group = svg("g", { class: `flow ${kind}` }, path, label);
      group.parts = { path, label };
      return group;
    },
    (group, flow) => {
      const from = cards.get(flow.source_id);
      const to = cards.get(flow.target_id);
      const isWithin = Math.abs(from.left - to.left) < 8;
      const isRight = from.left < to.left || isWithin;
      const offset = { requests: 0, pages: -5, puts: 7 }[FLOWS[flow.kind]?.[0]] ?? 0;
      const x1 = (isRight ? from.right : from.left) - frame.left;
      const x2 = (isWithin || !isRight ? to.right : to.left) - frame.left;
      const y1 = from.top + from.height / 2 - frame.top + offset;
      const y2 = to.top + to.height / 2 - frame.top + offset;
      const bend = isWithin ? LOOP : (x2 - x1) / 2;
      const back = isWithin ? -LOOP : bend;
      const size = strength(flow);
      const { path, label } = group.parts;
      setAttribute(path, "d", `M${x1},${y1} C${x1 + bend},${y1} ${x2 - back},${y2} ${x2},${y2}`);
      path.style.strokeWidth = `${Math.min(1.2 + size, 5)}px`;
      path.style.animationDuration = `${Math.max(0.5, 2.4 - size).toFixed(1)}s`;
      group.classList.toggle("idle", size < 0.02);
      group.classList.toggle("faint", Boolean(chosen) && !isOf(flow));
      group.classList.toggle("chosen", Boolean(chosen) && isOf(flow));
      setText(label, isLabelled(flow) && !isWithin ? flowText(flow) : "");
      setAttribute(label, "x", (x1 + x2) / 2);
      setAttribute(label, "y", (y1 + y2) / 2 - 6);
    });
}

function makeFlowTable() {
  const body = h("tbody");
  const none = h("p", { class: "muted" }, "Nothing has moved in the last seconds.");
  const table = h("details", { class: "panel flows" },
    h("summary", {}, "What moves, as a table"),
    h("div", { class: "scroll" }, h("table", {},
      h("thead", {}, h("tr", {}, ["From", "To", "What"].map((name) => h("th", { scope: "col" }, name)),
        ["per second", "tokens/s", "pages/s", "bytes/s", "open now"].map((name) => h("th", { scope: "col", class: "number" }, name)))),
      body)), none);
  let isFirst = true;
  table.show = (flows) => {
    if (isFirst && flows.length) {
      isFirst = false;
      table.open = flows.length <= OPEN_FLOWS;
    }
    if (!table.open) return;
    none.hidden = flows.length > 0;
    reconcile(body, flows, (flow) => `${flow.kind} ${flow.source_id} ${flow.target_id}`,
      () => h("tr", {}, Array.from({ length: 8 }, (_, at) => h("td", at > 2 ? { class: "number" } : {}))),
      (row, flow) => {
        const shown = (value, write) => (value ? write(value) : "–");
        const texts = [flow.source_id, flow.target_id, FLOWS[flow.kind]?.[1] ?? "", shown(flow.per_second, rate),
          shown(flow.tokens_per_second, rate), shown(flow.pages_per_second, rate),
          shown(flow.bytes_per_second, bytes), shown(flow.open, count)];
        texts.forEach((text, at) => setText(row.children[at], text));
      });
  };
  return table;
}

function makeStarting() {
  const list = h("ul", { class: "starting" });
  const panel = h("section", { class: "panel", "aria-label": "Starting" }, h("h2", {}, "Starting"), list);
  panel.show = (members) => {
    const starting = members.filter((member) => member.start);
    panel.hidden = !starting.length;
    reconcile(list, starting, (member) => member.member_id,
      () => h("li", {}, h("span", { class: "name" }), h("progress", { max: 1 }), h("span", { class: "phase" }),
        h("span", { class: "muted number" })),
      (item, member) => {
        const [name, bar, phase, took] = item.children;
        setText(name, member.member_id);
        setAttribute(bar, "value", member.start.fraction ?? null);
        setAttribute(bar, "aria-label", `${member.member_id}: ${member.start.phase}`);
        const done = member.start.fraction === undefined ? "" : ` ${percent(member.start.fraction)}`;
        setText(phase, `${member.start.phase ?? "starting"}${done}`);
        setText(took, time(seconds(member.start.elapsed)));
      });
  };
  return panel;
}

function legend() {
  const item = (kind, text) => h("li", {}, h("i", { class: `key ${kind}`, "aria-hidden": "true" }), text);
  return h("ul", { class: "legend", "aria-label": "Legend" },
    item("used", "used"), item("cached", "cached"), item("quarantined", "quarantined"),
    item("line requests", "requests"), item("line pages", "pages filled"), item("line puts", "pages stored"));
}

export function showFleet(section) {
  const tiles = makeTiles();
  const starting = makeStarting();
  const plans = makePlans();
  const drawing = makeLanes();
  const { picture, lanes } = drawing;
  const table = makeFlowTable();
  const summary = h("p", { class: "muted summary" });
  section.append(
    h("div", { class: "heading" }, h("h1", { id: "fleet-title" }, "Fleet"), summary, legend()),
    tiles, starting, plans, picture, table);
  table.addEventListener("toggle", () => mesh.now && table.show(mesh.now.flows));

  const redraw = () => {
    if (!section.hidden && mesh.now) drawEdges(drawing, mesh.now.flows);
  };
  for (const event of ["pointerover", "pointerleave", "focusin", "focusout"]) {
    picture.addEventListener(event, () => requestAnimationFrame(redraw));
  }
  new ResizeObserver(redraw).observe(picture);

  function update() {
    if (!mesh.now) return;
    const { members, flows } = mesh.now;
    tiles.show();
    starting.show(members);
    plans.show(mesh.now.plans);
    const bad = members.filter((member) => !member.healthy).length;
    setText(summary, `${members.length} members${bad ? `, ${bad} without requests` : ", all well"}`);
    let most = 0;
    LANES.forEach(([, , roles], at) => {
      const mine = members.filter((member) => roles.includes(role(member)))
        .sort((a, b) => order.compare(role(b), role(a)) || order.compare(a.member_id, b.member_id));
      const { lane, list, number } = lanes[at];
      lane.classList.toggle("many", mine.length > MANY);
      most = Math.max(most, mine.length);
      setText(number, mine.length ? String(mine.length) : "none");
      reconcile(list, mine, (member) => `${member.role} ${member.address ?? ""} ${member.member_id}`, makeCard, updateCard);
    });
    picture.classList.toggle("wide", most > MANY);
    redraw();
    table.show(flows);
  }
  return { update };
}
