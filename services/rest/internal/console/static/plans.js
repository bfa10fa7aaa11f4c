// What planners want, why, and what they did.

import { h, reconcile, setText } from "./dom.js";
import { clock, millis } from "./format.js";

const COLUMNS = ["model", "planner", "wants", "there are", "alarms", "why", "did"];
const ALARMS = COLUMNS.indexOf("alarms");
const numbers = (prefill, decode) => `${prefill ?? 0} prefill, ${decode ?? 0} decode`;

const told = (act) => `${clock(millis(act.time))} ${act.text}`;

/** A panel that shows itself while there are plans. */
export function makePlans() {
  const body = h("tbody");
  const heads = COLUMNS.map((name) => h("th", { scope: "col" }, name));
  const table = h("table", {}, h("thead", {}, h("tr", {}, heads)), body);
  const panel = h("section", { class: "panel plans", "aria-label": "Plans", hidden: true },
    h("h2", {}, "Plans"), h("div", { class: "scroll" }, table));
  panel.show = (plans) => {
    panel.hidden = !plans.length;
    reconcile(body, plans, (plan) => `${plan.planner_id} ${plan.model}`,
      () => h("tr", {}, COLUMNS.map((name) => h("td", { "data-name": name }, h("span", {})))),
      (row, plan) => {
        const acts = plan.acts ? "acts" : "advises";
        const alarms = (plan.alarms ?? []).join("\n");
        const texts = [plan.model, `${plan.planner_id} ${acts}`,
          numbers(plan.wanted_prefill, plan.wanted_decode), numbers(plan.seen_prefill, plan.seen_decode),
          alarms, plan.why ?? "", (plan.history ?? []).map(told).join("\n")];
        texts.forEach((text, at) => setText(row.children[at].firstElementChild, text));
        row.children[ALARMS].firstElementChild.className = alarms ? "chip bad" : "";
      });
  };
  return panel;
}
