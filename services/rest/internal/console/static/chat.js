// A playground for chats: one model, or two beside each other.

import { field, h, reconcile, setText } from "./dom.js";
import { count, rate, time } from "./format.js";
import { readEvents } from "./events.js";
import { Attachments, thumbnails } from "./images.js";
import { mesh } from "./mesh.js";
import { chatHeaders, failure } from "./session.js";

const TOOLS = [{
  type: "function",
  function: {
    name: "get_weather",
    description: "The weather in a city now.",
    parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
  },
}];
const SCHEMA = {
  type: "object",
  properties: { answer: { type: "string" }, confidence: { type: "number" } },
  required: ["answer", "confidence"],
};

/** Parses the text of a field; an error names the field. */
function parsed(area, name) {
  const text = area.value.trim();
  if (!text) return undefined;
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`${name}: ${error.message}`);
  }
}

/** A message's content: its images, and then the text. */
function parts(text, images) {
  const shown = images.map((image) => ({ type: "image_url", image_url: { url: image.url } }));
  return text.trim() ? [...shown, { type: "text", text }] : shown;
}

class Pane {
  constructor(name, send) {
    this.messages = [];
    this.select = h("select", { "aria-label": `Model ${name}` });
    this.log = h("div", { class: "log", role: "log", "aria-live": "polite", "aria-label": `Conversation ${name}`, tabindex: "0" });
    this.facts = h("p", { class: "muted facts-line" });
    this.element = h("section", { class: "pane panel", "aria-label": `Chat ${name}` }, h("div", { class: "pane-head" }, this.select, this.facts), this.log);
    this.send = send;
    this.control = null;
  }

  get isBusy() { return this.control !== null; }

  clear() {
    this.stop();
    this.messages = [];
    this.log.replaceChildren();
    setText(this.facts, "");
  }

  stop() { this.control?.abort(); }

  say(kind, text = "", images = []) {
    const body = h("div", { class: "text", hidden: images.length > 0 && !text }, text);
    const shown = images.length > 0 && h("div", { class: "thumbnails" }, thumbnails(images));
    const element = h("div", { class: `message ${kind}` }, h("span", { class: "who" }, kind), shown, body);
    this.log.append(element);
    this.log.scrollTop = this.log.scrollHeight;
    return { element, body };
  }

  /** Sends the conversation and shows the answer as it comes. */
  async answer(options) {
    const control = this.control = new AbortController();
    const messages = this.messages;
    const began = performance.now();
    const reply = { content: "", reasoning: "", calls: [] };
    const shown = this.say("assistant");
    shown.element.setAttribute("aria-busy", "true");
    let first;
    let usage = null;
    let id = "";
    let reason = "";
    try {
      const response = await fetch("/v1/chat/completions", {
        method: "POST",
        headers: { ...chatHeaders(), "content-type": "application/json" },
        signal: control.signal,
        body: JSON.stringify({
          ...options, model: this.select.value,
          messages: [...options.messages, ...messages],
          stream: true, stream_options: { include_usage: true },
        }),
      });
      if (!response.ok) throw await failure(response);
      for await (const data of readEvents(response)) {
        if (data === "[DONE]") break;
        const event = JSON.parse(data);
        if (event.error) throw new Error(event.error.message);
        id ||= event.id ?? "";
        usage = event.usage ?? usage;
        const choice = event.choices?.[0];
        reason = choice?.finish_reason ?? reason;
        if (choice && this.take(reply, choice.delta ?? {}, shown)) first ??= performance.now();
      }
    } catch (error) {
      if (error.name !== "AbortError") this.say("error", error.message);
      else reason = "stopped";
    }
    this.control = null;
    // Cleared meanwhile.
    if (this.messages !== messages) return;
    shown.element.removeAttribute("aria-busy");
    // A call that is cut off can neither be answered nor sent again.
    if (reason === "stopped") reply.calls = [];
    const message = { role: "assistant", content: reply.content };
    if (reply.calls.length) message.tool_calls = reply.calls;
    if (reply.content || reply.calls.length) messages.push(message);
    else shown.element.remove();
    this.tell(began, first, usage, reason, id);
    if (reply.calls.length) this.askForResults(reply.calls);
  }

  /** Adds a delta; says whether it had anything. */
  take(reply, delta, shown) {
    const reasoning = delta.reasoning_content ?? delta.reasoning ?? "";
    reply.content += delta.content ?? "";
    if (reasoning) {
      reply.reasoning += reasoning;
      if (!reply.thoughts) {
        reply.thoughts = h("div", { class: "text" });
        shown.element.insertBefore(
          h("details", { class: "reasoning" }, h("summary", {}, "Reasoning"), reply.thoughts), shown.body);
      }
      setText(reply.thoughts, reply.reasoning);
    }
    for (const call of delta.tool_calls ?? []) {
      const at = call.index ?? 0;
      const known = (reply.calls[at] ??= { id: "", type: "function", function: { name: "", arguments: "" } });
      known.id ||= call.id ?? "";
      known.function.name ||= call.function?.name ?? "";
      known.function.arguments += call.function?.arguments ?? "";
      known.shown ??= shown.element.appendChild(h("pre", { class: "call" }));
      setText(known.shown, `${known.function.name}(${known.function.arguments})`);
      Object.defineProperty(known, "shown", { enumerable: false });
    }
    const isAtEnd = this.log.scrollHeight - this.log.scrollTop - this.log.clientHeight < 60;
    setText(shown.body, reply.content);
    if (isAtEnd) this.log.scrollTop = this.log.scrollHeight;
    return Boolean(delta.content || reasoning || delta.tool_calls?.length);
  }

  tell(began, first, usage, reason, id) {
    const now = performance.now();
    const output = usage?.completion_tokens;
    const parts = [
      first && `first text after ${time((first - began) / 1000)}`,
      output && `${count(output)} tokens`,
      output > 1 && first && now > first && `${rate(((output - 1) * 1000) / (now - first))} tok/s`,
      usage && `${count(usage.prompt_tokens)} in the prompt, ${count(usage.prompt_tokens_details?.cached_tokens)} cached`,
      reason,
    ].filter(Boolean);
    this.facts.replaceChildren(parts.join(" · "), id ? " · " : "",
      id ? h("a", { href: `#requests/${encodeURIComponent(id)}` }, "timeline") : "");
  }

  /** Asks for what the called functions return, and goes on with that. */
  askForResults(calls) {
    const areas = calls.map((call) => h("textarea", { rows: 2, spellcheck: "false" }));
    const form = h("form", { class: "results" },
      calls.map((call, at) => field(`Result of ${call.function.name}`, areas[at])),
      h("button", { type: "submit" }, "Send results"));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      form.remove();
      calls.forEach((call, at) => {
        this.messages.push({ role: "tool", tool_call_id: call.id, content: areas[at].value });
        this.say("tool", `${call.function.name}: ${areas[at].value}`);
      });
      this.send(this);
    });
    this.log.append(form);
    this.log.scrollTop = this.log.scrollHeight;
  }
}

export function showChat(section) {
  const controls = {
    system: h("textarea", { rows: 2 }),
    temperature: h("input", { type: "number", min: 0, max: 2, step: 0.1, value: 0.7 }),
    tokens: h("input", { type: "number", min: 1, step: 1, value: 256 }),
    seed: h("input", { type: "number", step: 1, placeholder: "any" }),
    tools: h("textarea", { rows: 4, spellcheck: "false", class: "mono" }),
    choice: h("select", {}, ["auto", "required", "none"].map((name) => h("option", { value: name }, name))),
    schema: h("textarea", { rows: 4, spellcheck: "false", class: "mono" }),
  };
  const example = (area, value) => h("button", {
    type: "button", class: "link", onclick: () => { area.value = JSON.stringify(value, null, 1); },
  }, "example");
  const two = h("input", { type: "checkbox" });
  const prompt = h("textarea", { rows: 2, "aria-label": "Message", placeholder: "Message · Enter sends, Shift+Enter begins a line" });
  const submit = h("button", { type: "submit", class: "primary" }, "Send");
  const stop = h("button", { type: "button", disabled: true }, "Stop");
  const clear = h("button", { type: "button" }, "Clear");
  const problem = h("p", { class: "note bad", role: "alert", hidden: true });
  const complain = (text) => {
    problem.hidden = !text;
    setText(problem, text);
  };
  const panes = [new Pane("A", run), new Pane("B", run)];
  panes[1].element.hidden = true;

  const settings = h("aside", { class: "panel settings", "aria-label": "Settings of the chat" },
    h("label", { class: "inline" }, two, " two models beside each other"),
    field("System message", controls.system),
    h("div", { class: "trio" }, field("Temperature", controls.temperature), field("Most tokens", controls.tokens), field("Seed", controls.seed)),
    h("details", {}, h("summary", {}, "Tools"), field("JSON list", controls.tools), example(controls.tools, TOOLS), field("Use", controls.choice)),
    h("details", {}, h("summary", {}, "Answer’s schema"), field("JSON schema", controls.schema), example(controls.schema, SCHEMA)));
  const form = h("form", { class: "composer panel" });
  const attachments = new Attachments(form, () => limits(), complain);
  form.append(attachments.shown, prompt, h("div", { class: "buttons" }, attachments.element, submit, stop, clear));
  section.append(
    h("div", { class: "heading" }, h("h1", { id: "chat-title" }, "Chat")),
    h("div", { class: "chat" }, settings,
      h("div", { class: "conversation" }, h("div", { class: "panes" }, panes.map((pane) => pane.element)), problem, form)));

  function options() {
    const tools = parsed(controls.tools, "Tools");
    const schema = parsed(controls.schema, "Answer’s schema");
    const made = {
      messages: controls.system.value.trim() ? [{ role: "system", content: controls.system.value }] : [],
      temperature: Number(controls.temperature.value),
      max_tokens: Number(controls.tokens.value),
    };
    if (controls.seed.value !== "") made.seed = Number(controls.seed.value);
    if (tools) Object.assign(made, { tools, tool_choice: controls.choice.value });
    if (schema) made.response_format = { type: "json_schema", json_schema: { name: "answer", schema, strict: true } };
    return made;
  }

  const active = () => panes.filter((pane) => !pane.element.hidden);

  /** Bounds of a model's images, null: it takes none. Adapters see as their models do. */
  function imagesOf(name) {
    const base = mesh.now?.adapters.find((one) => one.name === name)?.parent ?? name;
    return mesh.now?.models.find((model) => model.name === base)?.images ?? null;
  }

  const limits = () => active().map((pane) => imagesOf(pane.select.value)).find(Boolean) ?? null;

  function showBusy() {
    const isBusy = panes.some((pane) => pane.isBusy);
    submit.disabled = isBusy;
    stop.disabled = !isBusy;
  }

  async function run(pane) {
    problem.hidden = true;
    let made;
    try {
      made = options();
    } catch (error) {
      complain(error.message);
      return;
    }
    const answering = pane.answer(made);
    showBusy();
    await answering;
    showBusy();
  }

  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const text = prompt.value;
    const hasImages = attachments.images.length > 0;
    if ((!text.trim() && !hasImages) || submit.disabled || attachments.isReading) return;
    const blind = hasImages && active().find((pane) => !imagesOf(pane.select.value));
    if (blind) {
      complain(`${blind.select.value} takes no images.`);
      return;
    }
    try {
      options();
    } catch (error) {
      complain(error.message);
      return;
    }
    prompt.value = "";
    const images = attachments.take();
    for (const pane of active()) {
      pane.messages.push({ role: "user", content: images.length ? parts(text, images) : text });
      pane.say("user", text, images);
      run(pane);
    }
  });
  prompt.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      form.requestSubmit();
    }
  });
  stop.addEventListener("click", () => panes.forEach((pane) => pane.stop()));
  clear.addEventListener("click", () => panes.forEach((pane) => pane.clear()));
  two.addEventListener("change", () => {
    panes[1].element.hidden = !two.checked;
    if (two.checked && panes[1].select.options.length > 1 && panes[1].select.selectedIndex === panes[0].select.selectedIndex) {
      panes[1].select.selectedIndex = (panes[0].select.selectedIndex + 1) % panes[1].select.options.length;
    }
  });

  function update() {
    if (!mesh.now) return;
    const names = mesh.now.models.filter((model) => model.has_chat).map((model) => model.name);
    const serving = mesh.now.adapters.filter((one) => one.state === "serving" && names.includes(one.parent));
    const all = [...names, ...serving.map((one) => one.name)];
    for (const pane of panes) {
      reconcile(pane.select, all, (name) => name, (name) => h("option", { value: name }, name), () => {});
    }
  }
  return { update };
}
