// The mesh as WatchMesh tells of it, kept up to date.

import { readEvents } from "./events.js";
import { failure, meshHeaders, onSession } from "./session.js";

const INTERVAL = "1s";
const SILENT_MS = 10000;
const HIDDEN_MS = 30000;
const MAX_POINTS = 300;
const MAX_ENDED = 200;

export const mesh = {
  /** The newest message; null before the first. */
  now: null,
  points: [],
  ended: [],
  /** connecting, live, waiting, refused or hidden. */
  state: "connecting",
  /** Why there is no stream. */
  problem: null,
};

const listeners = new Set();

/** Calls back after every message, and when the state changes; until a dialog closes, if one is given. */
export function onMesh(listener, dialog) {
  listeners.add(listener);
  dialog?.addEventListener("close", () => listeners.delete(listener));
  listener();
}

function tell() {
  for (const listener of listeners) listener();
}

function setState(state, problem = null) {
  mesh.state = state;
  mesh.problem = problem;
  tell();
}

let stop = new AbortController();
let run = 0;

async function follow(mine) {
  let delay = 500;
  while (mine === run) {
    stop = new AbortController();
    const watchdog = { timer: 0 };
    try {
      await watch(watchdog, () => { delay = 500; });
      // The gateway ends streams of some age; the next one begins at once.
    } catch (error) {
      if (mine !== run) return;
      if ([401, 403, 404].includes(error.status)) {
        setState("refused", error);
        return;
      }
      setState("waiting", error);
    } finally {
      clearTimeout(watchdog.timer);
    }
    await new Promise((resolve) => setTimeout(resolve, delay));
    delay = Math.min(delay * 2, 8000);
  }
}

async function watch(watchdog, onMessage) {
  const control = stop;
  const expect = () => {
    clearTimeout(watchdog.timer);
    watchdog.timer = setTimeout(() => control.abort(), SILENT_MS);
  };
  expect();
  const response = await fetch(`/mesh/watch?interval=${INTERVAL}`, {
    headers: meshHeaders(), signal: control.signal, cache: "no-store",
  });
  if (!response.ok) throw await failure(response);
  let isFirst = true;
  for await (const data of readEvents(response)) {
    const message = JSON.parse(data);
    if (message.error) throw new Error(message.error.message);
    take(message, isFirst);
    isFirst = false;
    expect();
    onMessage();
  }
}

function take(message, isFirst) {
  if (isFirst) {
    mesh.points = [];
    mesh.ended = [];
  }
  mesh.points = [...mesh.points, ...(message.points ?? [])].slice(-MAX_POINTS);
  mesh.ended = [...mesh.ended, ...(message.ended_requests ?? [])].slice(-MAX_ENDED);
  for (const list of ["members", "flows", "models", "adapters", "running_requests", "plans"]) message[list] ??= [];
  mesh.now = message;
  mesh.state = "live";
  mesh.problem = null;
  tell();
}

/** Follows the mesh anew, with the present keys. */
export function connect() {
  run += 1;
  stop.abort();
  setState("connecting");
  follow(run);
}

onSession(connect);

// A page that nobody sees costs nothing.
let hiding = 0;
document.addEventListener("visibilitychange", () => {
  clearTimeout(hiding);
  if (!document.hidden) {
    if (mesh.state === "hidden") connect();
    return;
  }
  hiding = setTimeout(() => {
    run += 1;
    stop.abort();
    setState("hidden");
  }, HIDDEN_MS);
});
