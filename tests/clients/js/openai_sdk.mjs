// The official JavaScript SDK: chats, streams, a tool, a parsed answer, responses.
import assert from "node:assert/strict";
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";
import { enough, model, question, weather } from "./settings.mjs";

const client = new OpenAI();
const messages = [{ role: "user", content: question }];
const brief = { model, messages, max_tokens: 12, temperature: 0 };
const chat = await client.chat.completions.create(brief);
let text = "";
for await (const chunk of await client.chat.completions.create({ ...brief, stream: true })) {
  text += chunk.choices[0]?.delta.content ?? "";
}
assert.equal(text, chat.choices[0].message.content);

const called = await client.chat.completions.create({
  model, messages, max_tokens: enough, tool_choice: "required", tools: [{ type: "function", function: weather }],
});
assert.equal(called.choices[0].message.tool_calls[0].function.name, "get_weather");

// Letters: JavaScript counts some characters twice, and a schema does not.
const City = z.object({ name: z.string().regex(/^[A-Za-z ]{1,20}$/), mail: z.email().max(40), founded: z.iso.date() });
const parsed = await client.chat.completions.parse({
  model, messages, max_tokens: enough, response_format: zodResponseFormat(City, "city"),
});
City.parse(parsed.choices[0].message.parsed);

const response = await client.responses.create({ model, input: question, max_output_tokens: 16, temperature: 0 });
assert.ok(response.output_text);
const kinds = [];
for await (const event of await client.responses.create({ model, input: question, max_output_tokens: 16, stream: true })) {
  kinds.push(event.type);
}
assert.equal(kinds[0], "response.created");
assert.ok(["response.completed", "response.incomplete"].includes(kinds.at(-1)));
