// OpenAI's agents SDK for JavaScript, over the Responses API and over chats.
import assert from "node:assert/strict";
import { Agent, MaxTurnsExceededError, run, setOpenAIAPI, setTracingDisabled, tool } from "@openai/agents";
import { z } from "zod";
import { model, question } from "./settings.mjs";

setTracingDisabled(true);
for (const api of ["responses", "chat_completions"]) {
  setOpenAIAPI(api);
  const modelSettings = { maxTokens: 400, temperature: 0 };
  const plain = await run(new Agent({ name: "plain", instructions: "Be brief.", model, modelSettings }), question);
  assert.ok(plain.finalOutput);
  const asked = [];
  const getWeather = tool({
    name: "get_weather",
    description: "Tells the weather of a city.",
    parameters: z.object({ city: z.string().max(20) }),
    execute: async ({ city }) => { asked.push(city); return `It is sunny in ${city}.`; },
  });
  const caller = new Agent({
    name: "caller", instructions: "Use the tool.", model, tools: [getWeather],
    modelSettings: { ...modelSettings, toolChoice: "required" }, toolUseBehavior: "stop_on_first_tool",
  });
  const called = await run(caller, "How is the weather in Paris?");
  assert.equal(called.finalOutput, `It is sunny in ${asked[0]}.`);
  const outputType = z.object({ name: z.string().max(20) });
  const both = new Agent({ name: "both", instructions: "Name a city.", model, modelSettings, tools: [getWeather], outputType });
  // In each turn the model calls or answers.
  asked.length = 0;
  try {
    outputType.parse((await run(both, "Name a city.", { maxTurns: 4 })).finalOutput);
  } catch (error) {
    if (!(error instanceof MaxTurnsExceededError)) throw error;
    assert(asked.length >= 4);
  }
}
