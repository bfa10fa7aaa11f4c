// What the person at the console has given: an API key, the operators' token. Both stay in this tab.

const store = window.sessionStorage;
const KEY = "weft-api-key";
const TOKEN = "weft-operators-token";

export const session = {
  get key() { return store.getItem(KEY) ?? ""; },
  get token() { return store.getItem(TOKEN) ?? ""; },
  set(key, token) {
    for (const [name, value] of [[KEY, key], [TOKEN, token]]) {
      if (value) store.setItem(name, value);
      else store.removeItem(name);
    }
    for (const listener of listeners) listener();
  },
};

const listeners = new Set();

/** Calls back when keys change. */
export const onSession = (listener) => listeners.add(listener);

const bearer = (secret) => (secret ? { authorization: `Bearer ${secret}` } : {});

/** Headers of calls about the mesh. */
export const meshHeaders = () => bearer(session.token || session.key);

/** Headers of requests to models. */
export const chatHeaders = () => bearer(session.key);

/** What an answer that is a failure says. */
export async function failure(response) {
  let code = "";
  let message = `${response.status} ${response.statusText}`;
  try {
    const { error } = await response.json();
    ({ code, message } = { code: error.code ?? "", message: error.message ?? message });
  } catch {
    // Not of the edge, such as a proxy's page.
  }
  return Object.assign(new Error(message), { status: response.status, code });
}

/** Times that a call is made until the gateway that the page shows answers: the edge asks another one each time. */
export const MAX_CALLS = 5;

/** Calls one of MeshService's methods that change something. */
export async function operate(method, body) {
  for (let calls = 1; ; calls += 1) {
    const response = await fetch(`/mesh/${method}`, {
      method: "POST",
      headers: { ...meshHeaders(), "content-type": "application/json" },
      body: JSON.stringify(body),
    });
    if (response.ok) return response.json();
    const error = await failure(response);
    // Another gateway does not know this one.
    if (error.code !== "member_not_found" || calls === MAX_CALLS) throw error;
  }
}
