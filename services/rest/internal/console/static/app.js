// The console: its views, the connection, the keys.

import { dialog, field, h, setText } from "./dom.js";
import { clock } from "./format.js";
import { connect, mesh, onMesh } from "./mesh.js";
import { session } from "./session.js";
import { showFleet } from "./fleet.js";
import { showLoad } from "./load.js";
import { showRequests } from "./requests.js";
import { showModels } from "./models.js";
import { showChat } from "./chat.js";

const VIEWS = { fleet: showFleet, load: showLoad, requests: showRequests, models: showModels, chat: showChat };
const updates = {};
let shown = "";

/** Decodes a part of the address; one that nobody encoded stays as it is. */
function decoded(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

/** Shows the view that the address names: `#requests/ID` is the view `requests` with ID. */
function route() {
  const [name, ...rest] = location.hash.slice(1).split("/");
  const wanted = Object.hasOwn(VIEWS, name) ? name : "fleet";
  const section = document.getElementById(`view-${wanted}`);
  updates[wanted] ??= VIEWS[wanted](section);
  for (const other of Object.keys(VIEWS)) document.getElementById(`view-${other}`).hidden = other !== wanted;
  for (const link of document.querySelectorAll("[data-view]")) {
    if (link.dataset.view === wanted) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  document.title = `${wanted[0].toUpperCase()}${wanted.slice(1)} · Weft console`;
  const isNew = shown !== wanted;
  shown = wanted;
  updates[wanted].open?.(decoded(rest.join("/")));
  updates[wanted].update();
  if (isNew) window.scrollTo(0, 0);
}

const STATES = {
  connecting: ["connecting", ""],
  live: ["live", "good"],
  waiting: ["reconnecting", "warn"],
  refused: ["no access", "bad"],
  hidden: ["paused", ""],
};

function showConnection() {
  const [text, kind] = STATES[mesh.state];
  const chip = document.getElementById("connection");
  setText(chip, text);
  chip.className = `chip ${kind}`;
  const banner = document.getElementById("banner");
  banner.hidden = !["refused", "waiting"].includes(mesh.state);
  if (!banner.hidden) {
    const last = mesh.now ? ` What is shown is of ${clock(Date.parse(mesh.now.time))}.` : "";
    setText(banner, `${mesh.problem?.message ?? "No connection"}.${last}`.replace("..", "."));
  }
  setText(document.getElementById("gateway"), mesh.now?.gateway_id ?? "");
  const role = document.getElementById("role");
  role.hidden = !mesh.now;
  setText(role, mesh.now?.can_operate ? "operator" : "read only");
  role.className = mesh.now?.can_operate ? "chip accent" : "chip";
}

function askForKeys() {
  const key = h("input", { type: "password", autocomplete: "off", value: session.key, spellcheck: "false" });
  const token = h("input", { type: "password", autocomplete: "off", value: session.token, spellcheck: "false" });
  const form = h("form", {
    method: "dialog",
    onsubmit: () => session.set(key.value.trim(), token.value.trim()),
  },
    field("API key", key, "Where the gateway asks for keys: to chat, and to watch if it manages adapters."),
    field("Operators’ token", token, "To drain, flush, load adapters and set log levels."),
    h("p", { class: "muted" }, "Both stay in this tab and are sent to this address only."),
    h("footer", {},
      h("button", { type: "submit", class: "primary" }, "Use"),
      h("button", { type: "submit", onclick: () => { key.value = token.value = ""; } }, "Forget both")));
  dialog("Keys", form);
}

let hasAsked = false;

function main() {
  document.getElementById("keys").addEventListener("click", askForKeys);
  window.addEventListener("hashchange", route);
  onMesh(() => {
    showConnection();
    if (shown && mesh.now) updates[shown].update();
    if (mesh.state === "refused" && mesh.problem.status === 401 && !hasAsked) {
      hasAsked = true;
      askForKeys();
    }
  });
  route();
  connect();
}

main();
