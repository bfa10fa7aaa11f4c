// One member in full, and what operators can do to it.

import { confirm, dialog, h, reconcile, setText, toast } from "./dom.js";
import { count, percent, rate, role } from "./format.js";
import { mesh, onMesh } from "./mesh.js";
import { operate } from "./session.js";
import { health, pageBar } from "./fleet.js";

const LEVELS = ["debug", "info", "warning", "error"];

const find = (id) => mesh.now?.members.find((member) => member.member_id === id);

function facts(member) {
  const pages = member.pages ?? {};
  const rows = [
    ["Role", role(member)],
    ["Health", member.healthy ? "ok" : member.problem],
    ["Address", member.address],
    ["Model", member.model],
    ["Weights", member.weight_format && `${member.weight_format}; activations: ${member.dtype}`],
    ["Serves", member.task],
    ["Requests", `${count(member.running_requests)} running, ${count(member.waiting_requests)} waiting, ${count(member.filling_requests)} being filled`],
    ["Prompt tokens to compute", member.queued_tokens && count(member.queued_tokens)],
    ["Prefill", member.prefill_tokens_per_second && `${rate(member.prefill_tokens_per_second)} tokens/s`],
    ["Decode", member.decode_tokens_per_second && `${rate(member.decode_tokens_per_second)} tokens/s`],
    ["Pages", pages.total && `${count(pages.used)} used, ${count(pages.cached)} cached, ${count(pages.quarantined)} quarantined, ${count(pages.free)} free of ${count(pages.total)}`],
    ["Hit rate", member.hit_rate !== undefined && percent(member.hit_rate)],
    ["Sessions", member.sessions && `${count(member.sessions)} pin ${count(member.pinned_pages)} pages`],
    ["Adapters", member.adapters && count(member.adapters)],
    ["Circuit breaker", member.breaker?.replace("_", " ")],
    ["Transports", member.transports?.join(", ")],
    ["Incarnation", member.epoch],
    ...(member.tiers ?? []).map((tier) => [`Tier ${tier.name}`,
      `${count(tier.held_pages)}${tier.total_pages ? ` of ${count(tier.total_pages)}` : ""} pages, hit ${percent(tier.hit_rate)}`]),
    ...(member.notices ?? []).map((notice) => ["Notice", notice]),
  ];
  return rows.filter(([, value]) => value).map(([name, value], at) => ({ key: `${at} ${name}`, name, value }));
}

async function act(button, what, call) {
  button.disabled = true;
  try {
    toast(await call(), "good");
  } catch (error) {
    toast(`${what}: ${error.message}`, "bad");
  } finally {
    button.disabled = false;
  }
}

/** What draining a member would leave its model without. */
function warning(id) {
  const member = find(id);
  if (!member) return "";
  const others = mesh.now.members.filter((one) => one.member_id !== id && one.healthy
    && one.role === member.role && one.model === member.model);
  if (others.length) return "";
  return ["decode", "both"].includes(role(member))
    ? ` No other worker serves ${member.model}: waiting requests will fail.`
    : ` No other prefill worker serves ${member.model}.`;
}

function actions(id) {
  const body = { member_id: id };
  const drain = h("button", { type: "button", class: "drain" });
  drain.addEventListener("click", async () => {
    const isDraining = find(id)?.draining;
    const isSure = isDraining || await confirm(`Drain ${id}?`,
      `It takes no new requests, and those that wait there go to other workers. Running ones end there.${warning(id)}`, "Drain");
    if (!isSure) return;
    act(drain, `${id} ${isDraining ? "still drains" : "was not drained"}`, async () => {
      if (isDraining) {
        await operate("undrain", body);
        return `${id} takes requests again`;
      }
      const { running_requests: running } = await operate("drain", body);
      return `${id} drains; ${count(running)} requests run there`;
    });
  });
  const flush = h("button", { type: "button" }, "Flush cache");
  flush.addEventListener("click", async () => {
    const isSure = await confirm(`Flush the cache of ${id}?`,
      "Cached pages that no request uses are dropped; prompts are computed again.", "Flush");
    if (isSure) {
      act(flush, `${id} was not flushed`, async () => {
        const { flushed_pages: pages } = await operate("flush", body);
        return `${id}: ${count(pages)} pages flushed`;
      });
    }
  });
  const level = h("select", { "aria-label": "Log level" }, h("option", { value: "" }, "Log level…"),
    LEVELS.map((name) => h("option", { value: name }, name)));
  level.addEventListener("change", () => {
    const wanted = level.value;
    if (!wanted) return;
    // What it is afterwards is told; the choice may have been refused.
    level.value = "";
    act(level, `${id} keeps its log level`, async () => {
      const { previous_level: before } = await operate("log_level", { ...body, level: wanted });
      return `${id} logs ${wanted}${before ? `, not ${before} any more` : ""}`;
    });
  });
  const bar = h("div", { class: "actions", role: "group", "aria-label": "Actions" }, drain, flush, level);
  bar.show = (member) => {
    bar.hidden = !mesh.now.can_operate;
    drain.hidden = !["prefill", "decode", "both"].includes(role(member));
    setText(drain, member.draining ? "Undrain" : "Drain");
  };
  return bar;
}

export function openMember(id) {
  const list = h("dl", { class: "facts" });
  const bar = pageBar();
  const state = h("p", {});
  const buttons = actions(id);
  const readOnly = h("p", { class: "muted" }, "Read only: operators give the token under Keys, and the gateway runs with --console operate.");
  const shown = dialog(id, state, bar, list, buttons, readOnly);
  shown.classList.add("member-dialog");
  onMesh(() => {
    const member = find(id);
    if (!shown.open) return;
    if (!member) {
      setText(state, "It is not a member any more.");
      return;
    }
    const [word, kind] = health(member);
    setText(state, word);
    state.className = `chip ${kind}`;
    bar.show(member.pages);
    reconcile(list, facts(member), ({ key }) => key, () => h("div", {}, h("dt"), h("dd")),
      (row, { name, value }) => {
        setText(row.children[0], name);
        setText(row.children[1], String(value));
      });
    buttons.show(member);
    readOnly.hidden = Boolean(mesh.now.can_operate);
  }, shown);
}
