// Vercel's AI SDK: text, a stream, objects, a tool; over responses (its default) and chats.
import assert from "node:assert/strict";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import { model, question, url } from "./settings.mjs";

const openai = createOpenAI({ baseURL: `${url}/v1`, apiKey: "none" });
const compatible = createOpenAICompatible({ name: "weft", baseURL: `${url}/v1`, supportsStructuredOutputs: true });
const schema = z.object({ name: z.string().max(20) });
const getWeather = tool({
  description: "Tells the weather of a city.",
  inputSchema: z.object({ city: z.string().max(20) }),
  execute: async ({ city }) => `It is sunny in ${city}.`,
});
for (const chosen of [openai(model), openai.chat(model), compatible(model)]) {
  const brief = { model: chosen, prompt: question, maxOutputTokens: 16, temperature: 0 };
  const { text } = await generateText(brief);
  assert.ok(text);
  let streamed = "";
  for await (const part of streamText(brief).textStream) streamed += part;
  assert.equal(streamed, text);
  const object = await generateText({ ...brief, maxOutputTokens: 64, output: Output.object({ schema }) });
  schema.parse(object.output);
  const called = await generateText({
    ...brief, maxOutputTokens: 64, tools: { getWeather }, toolChoice: "required", stopWhen: stepCountIs(1),
  });
  assert.equal(called.toolCalls[0].toolName, "getWeather");
  const both = await generateText({
    ...brief, maxOutputTokens: 64, tools: { getWeather }, output: Output.object({ schema }), stopWhen: stepCountIs(2),
  });
  // The model decides: it calls the tool, or answers under the schema.
  const calls = both.steps.flatMap((step) => step.toolCalls);
  if (calls.length) assert.ok(calls.every((call) => call.toolName === "getWeather"));
  else schema.parse(both.output);
}
