// What the scripts of this folder share.
export const model = process.env.WEFT_TEST_MODEL;
export const url = process.env.WEFT_TEST_URL;
export const question = "What is the capital of France?";
// Tokens for any JSON of the schemas here, whose strings and whitespace are bounded.
export const enough = 1024;
export const weather = {
  name: "get_weather",
  description: "Tells the weather of a city.",
  parameters: {
    type: "object",
    properties: { city: { type: "string", maxLength: 20 } },
    required: ["city"],
    additionalProperties: false,
  },
};
