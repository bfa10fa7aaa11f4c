// Anthropic's SDK for JavaScript: a message, a stream.
import assert from "node:assert/strict";
import Anthropic from "@anthropic-ai/sdk";
import { model, question } from "./settings.mjs";

const client = new Anthropic();
const brief = { model, max_tokens: 12, temperature: 0, messages: [{ role: "user", content: question }] };
const message = await client.messages.create(brief);
const stream = client.messages.stream(brief);
const final = await stream.finalMessage();
assert.equal(final.content[0].text, message.content[0].text);
