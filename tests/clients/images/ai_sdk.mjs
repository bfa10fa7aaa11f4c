// Vercel's AI SDK: a picture over responses (its default) and chats, from bytes and as a file part.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, streamText } from "ai";

const { WEFT_TEST_MODEL: model, WEFT_TEST_URL: url, WEFT_TEST_SCENES: scenes } = process.env;
const picture = readFileSync(`${scenes}/elephant.jpg`);
const openai = createOpenAI({ baseURL: `${url}/v1`, apiKey: "none" });
const compatible = createOpenAICompatible({ name: "weft", baseURL: `${url}/v1` });
const question = { type: "text", text: "What is in the picture?" };
for (const chosen of [openai(model), openai.chat(model), compatible(model)]) {
  for (const image of [
    { type: "image", image: picture, mediaType: "image/jpeg" },
    { type: "file", data: picture, mediaType: "image/jpeg" },
  ]) {
    const brief = {
      model: chosen, maxOutputTokens: 24, temperature: 0,
      messages: [{ role: "user", content: [image, question] }],
    };
    assert.equal((await generateText(brief)).text, "An elephant.");
    let streamed = "";
    for await (const part of streamText(brief).textStream) streamed += part;
    assert.equal(streamed, "An elephant.");
  }
}
