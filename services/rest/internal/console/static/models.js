// Models, and the adapters of the registry with the workers that hold them.

import { confirm, dialog, field, h, reconcile, setText, toast } from "./dom.js";
import { count } from "./format.js";
import { mesh } from "./mesh.js";
import { operate } from "./session.js";

const HOLDER_KINDS = { device: "good", host: "good", disk: "", loading: "warn", failed: "bad", absent: "" };

function table(columns, body, firstNumber = columns.length) {
  const heads = columns.map((name, at) => h("th", { scope: "col", class: at >= firstNumber ? "number" : null }, name));
  return h("div", { class: "panel scroll" }, h("table", {}, h("thead", {}, h("tr", {}, heads)), body));
}

function holders(adapter) {
  return (adapter.holders ?? []).map((one) => h("span", {
    class: `chip ${HOLDER_KINDS[one.state] ?? ""}`, title: one.error || null,
  }, `${one.member_id} ${one.state}${one.requests ? ` · ${count(one.requests)}` : ""}`));
}

function askForAdapter() {
  const name = h("input", { required: true, autocomplete: "off", spellcheck: "false" });
  const path = h("input", { required: true, autocomplete: "off", spellcheck: "false" });
  const models = mesh.now.models.map((model) => h("option", { value: model.name }, model.name));
  const model = h("select", {}, models);
  const replace = h("input", { type: "checkbox" });
  const pinned = h("input", { type: "checkbox" });
  const submit = h("button", { type: "submit", class: "primary" }, "Load");
  const form = h("form", {},
    field("Name", name, "Requests name it as their model."),
    field("Folder", path, "Of a PEFT adapter, relative to the adapter root."),
    field("Base model", model),
    h("div", {}, h("label", { class: "inline" }, replace, " replace what has this name")),
    h("div", {}, h("label", { class: "inline" }, pinned, " keep it on every device")),
    h("footer", {}, submit));
  const asked = dialog("Load an adapter", form);
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    submit.disabled = true;
    try {
      await operate("load_adapter", {
        name: name.value.trim(), path: path.value.trim(), model: model.value,
        replace: replace.checked, pinned: pinned.checked,
      });
      toast(`${name.value.trim()} is loaded on every worker`, "good");
      asked.close();
    } catch (error) {
      toast(`${name.value.trim()} was not loaded: ${error.message}`, "bad");
    } finally {
      submit.disabled = false;
    }
  });
}

async function unload(name) {
  const isSure = await confirm(`Unload ${name}?`, "New requests for it fail at once; those under way go on.", "Unload");
  if (!isSure) return;
  try {
    await operate("unload_adapter", { name });
    toast(`${name} is unloaded`, "good");
  } catch (error) {
    toast(`${name} was not unloaded: ${error.message}`, "bad");
  }
}

export function showModels(section) {
  const models = h("tbody");
  const adapters = h("tbody");
  const load = h("button", { type: "button", class: "primary", onclick: askForAdapter }, "Load an adapter");
  const none = h("p", { class: "muted" }, "No adapters are registered.");
  const adapterTable = table(["adapter", "base model", "state", "folder", "digest", "on workers", ""], adapters);
  section.append(
    h("div", { class: "heading" }, h("h1", { id: "models-title" }, "Models")),
    table(["model", "state", "serves", "context", "prefill workers", "decode workers"], models, 3),
    h("div", { class: "heading" }, h("h2", {}, "Adapters"), load), none, adapterTable);

  function update() {
    if (!mesh.now) return;
    const { can_operate: isOperator } = mesh.now;
    load.hidden = !isOperator;
    reconcile(models, mesh.now.models, (model) => model.name,
      () => h("tr", {}, Array.from({ length: 6 }, (_, at) => h("td", at > 2 ? { class: "number" } : {}))),
      (row, model) => {
        const texts = [model.name, model.ready ? "ready" : model.problem, model.task, count(model.max_context_tokens),
          count(model.prefill_workers), count(model.decode_workers)];
        texts.forEach((text, at) => setText(row.children[at], text ?? ""));
        row.children[1].className = `outcome ${model.ready ? "good" : "bad"}`;
      });
    none.hidden = mesh.now.adapters.length > 0;
    adapterTable.hidden = !none.hidden;
    reconcile(adapters, mesh.now.adapters, (adapter) => `${adapter.name} ${adapter.digest} ${adapter.state}`,
      (adapter) => h("tr", {}, Array.from({ length: 6 }, (_, at) => h("td", at === 4 ? { class: "mono" } : {})),
        h("td", {}, h("button", { type: "button", onclick: () => unload(adapter.name) }, "Unload"))),
      (row, adapter) => {
        const texts = [adapter.name, adapter.parent, `${adapter.state}${adapter.pinned ? ", pinned" : ""}`,
          adapter.path, (adapter.digest ?? "").slice(0, 12)];
        texts.forEach((text, at) => setText(row.children[at], text ?? ""));
        const key = JSON.stringify(adapter.holders ?? []);
        if (row.holders !== key) {
          row.holders = key;
          row.children[5].replaceChildren(...holders(adapter));
        }
        row.children[6].firstChild.hidden = !isOperator || adapter.state !== "serving";
      });
  }
  return { update };
}
