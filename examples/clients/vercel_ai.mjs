// SPDX-License-Identifier: Apache-2.0
// Vercel's AI SDK on Blink, by three of its providers: a text, a stream, tools and an object.
//
// blink serve Qwen/Qwen3-0.6B       # in another terminal; any model that was trained to call tools
// npm install ai zod @ai-sdk/openai-compatible @ai-sdk/openai @ai-sdk/anthropic
// node examples/clients/vercel_ai.mjs
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const baseURL = process.env.OPENAI_BASE_URL ?? "http://127.0.0.1:8000/v1";
const apiKey = process.env.OPENAI_API_KEY ?? "none";
const headers = { Authorization: `Bearer ${apiKey}` };
const name = (await (await fetch(`${baseURL}/models`, { headers })).json()).data[0].id;
const models = {
  compatible: createOpenAICompatible({ name: "blink", baseURL, apiKey, supportsStructuredOutputs: true })(name),
  chat: createOpenAI({ baseURL, apiKey }).chat(name),
  responses: createOpenAI({ baseURL, apiKey }).responses(name),
  anthropic: createAnthropic({ baseURL, apiKey })(name),
};
const forecast = tool({
  description: "Tell the weather in a city.",
  inputSchema: z.object({ city: z.string() }),
  execute: async ({ city }) => `${city}: sunny, 27 degrees`,
});

for (const [provider, model] of Object.entries(models)) {
  const options = { model, maxOutputTokens: 200, maxRetries: 0 };
  const prompt = "What is the capital of France?";
  const { text, finishReason } = await generateText({ ...options, prompt });
  console.log(`${provider}: ${text} [${finishReason}]`);

  let streamed = "";
  for await (const part of streamText({ ...options, prompt }).textStream) streamed += part;
  console.log(`${provider} streamed: ${streamed}`);

  const agent = { ...options, tools: { forecast }, stopWhen: stepCountIs(5), prompt: "How is the weather in Rome?" };
  const run = await generateText(agent);
  console.log(`${provider} in ${run.steps.length} steps: ${run.text}`);
  const stream = streamText(agent);
  console.log(`${provider} streamed in ${(await stream.steps).length} steps: ${await stream.text}`);

  const schema = z.object({ name: z.string(), age: z.number().int() });
  const native = { providerOptions: { anthropic: { structuredOutputMode: "outputFormat" } } };
  const { object } = await generateObject({ ...options, ...native, schema, prompt: "Describe Anna." });
  console.log(`${provider} object: ${object.name}, ${object.age}`);

  const failed = await generateText({ ...options, prompt, maxOutputTokens: 1e6 }).catch((error) => error);
  console.log(`${provider} error: ${failed.statusCode} ${failed.message.includes("1000000")}`);
}
