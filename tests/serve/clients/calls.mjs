// Calls of JavaScript programs that speak OpenAI's API: `node calls.mjs CLIENT URL MODEL` prints {call: "" or what failed}.
// CLIENT is openai, the official client, or ai, Vercel's. Each function is one call; it asserts what its user would see.

import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const [client, baseURL, model] = process.argv.slice(2);
// The packages are where the program was started, not beside this file.
const require = createRequire(pathToFileURL(`${process.cwd()}/package.json`));
const load = (name) => import(pathToFileURL(require.resolve(name)));

const hello = [{ role: "user", content: "Hello?" }];
const city = {
  type: "object", properties: { city: { type: "string", maxLength: 8 } }, required: ["city"], additionalProperties: false,
};
const image = "data:image/png;base64,iVBORw0KGgo=";

async function refused(call, ...words) {
  const error = await call().then(() => assert.fail("it was not refused"), (error) => error);
  const found = `${error.message} ${error.responseBody ?? ""}`;
  for (const word of words) assert.ok(found.includes(word), found);
}

async function official() {
  const { default: OpenAI } = await load("openai");
  const api = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
  const ask = (more) => api.chat.completions.create({ model, messages: hello, max_tokens: 20, temperature: 0, ...more });
  const told = async (messages) => assert.ok((await ask({ messages })).choices[0].message.content);
  const tool = { type: "function", function: { name: "weather", parameters: city } };
  const format = { type: "json_schema", json_schema: { name: "city", schema: city } };
  const given = { model, instructions: "Be brief.", input: [{ role: "developer", content: "In English." }, ...hello] };
  return {
    chat: () => told(hello),
    stream: async () => {
      let text = "";
      for await (const piece of await ask({ stream: true })) text += piece.choices[0]?.delta?.content ?? "";
      assert.equal(text, (await ask()).choices[0].message.content);
    },
    tools: async () => {
      const [call] = (await ask({ tools: [tool], tool_choice: "required", max_tokens: 60 })).choices[0].message.tool_calls;
      assert.ok("city" in JSON.parse(call.function.arguments));
    },
    "run tools": async () => {
      const given = { model, messages: hello, max_tokens: 60 };
      const used = { ...tool, function: { ...tool.function, parse: JSON.parse, function: () => "Rain." } };
      const runner = api.chat.completions.runTools({ ...given, tools: [used], response_format: format });
      assert.ok(await runner.finalContent());
    },
    structured: async () => {
      const text = (await ask({ response_format: format, max_tokens: 60 })).choices[0].message.content;
      assert.ok("city" in JSON.parse(text));
    },
    "structured with tools": async () => {
      const { message } = (await ask({ response_format: format, tools: [tool], max_tokens: 60 })).choices[0];
      assert.ok("city" in JSON.parse(message.content ?? message.tool_calls[0].function.arguments));
    },
    "two users": () => told([...hello, ...hello]),
    "system later": () => told([...hello, { role: "system", content: "Be brief." }]),
    "assistant last": () => told([...hello, { role: "assistant", content: "Well, " }]),
    choices: async () => assert.equal((await ask({ n: 40, max_tokens: 2 })).choices.length, 40),
    responses: async () => {
      const whole = await api.responses.create({ ...given, max_output_tokens: 20, temperature: 0 });
      const stream = api.responses.stream({ ...given, max_output_tokens: 20, temperature: 0 });
      let text = "";
      for await (const event of stream) text += event.type === "response.output_text.delta" ? event.delta : "";
      assert.equal(text, whole.output_text);
      assert.equal((await stream.finalResponse()).status, whole.status);
    },
    models: async () => assert.deepEqual((await api.models.list()).data.map((one) => one.id), [model]),
    embeddings: () => refused(() => api.embeddings.create({ model, input: "?" }), "nothing at /v1/embeddings"),
    "bad temperature": () => refused(() => ask({ temperature: 3 }), "temperature"),
    image: () => refused(
      () => ask({ messages: [{ role: "user", content: [{ type: "image_url", image_url: { url: image } }] }] }),
      "messages[0].content[0]", "image_url",
    ),
  };
}

async function vercel() {
  const { embed, generateObject, generateText, jsonSchema, Output, stepCountIs, streamText, tool } = await load("ai");
  const { createOpenAI } = await load("@ai-sdk/openai");
  const { createOpenAICompatible } = await load("@ai-sdk/openai-compatible");
  const compatible = createOpenAICompatible({ name: "quern", baseURL, supportsStructuredOutputs: true });
  const openai = createOpenAI({ baseURL, apiKey: "none" });
  const common = { maxRetries: 0, maxOutputTokens: 60, temperature: 0 };
  const tools = {
    weather: tool({ description: "Now.", inputSchema: jsonSchema(city), execute: async () => "Rain." }),
  };
  const calls = {};
  for (const [name, own] of [["compatible", compatible(model)], ["chat", openai.chat(model)], ["responses", openai(model)]]) {
    const ask = (more) => generateText({ model: own, prompt: "Hello?", ...common, ...more });
    calls[`${name}: text`] = async () => assert.ok((await ask({ system: "Be brief." })).text);
    calls[`${name}: stream`] = async () => {
      let text = "";
      for await (const piece of streamText({ model: own, prompt: "Hello?", ...common }).textStream) text += piece;
      assert.equal(text, (await ask()).text);
    };
    calls[`${name}: tools`] = async () => {
      const { toolCalls } = await ask({ tools, toolChoice: "required" });
      assert.ok("city" in toolCalls[0].input);
    };
    calls[`${name}: tool result`] = async () => {
      const prepareStep = ({ stepNumber }) => ({ toolChoice: stepNumber ? "none" : "required" });
      assert.ok((await ask({ tools, stopWhen: stepCountIs(2), prepareStep })).text);
    };
    calls[`${name}: object`] = async () => {
      const made = await generateObject({ model: own, schema: jsonSchema(city), prompt: "Hello?", ...common });
      assert.ok("city" in made.object);
    };
    calls[`${name}: object with tools`] = async () => {
      const made = await ask({ tools, output: Output.object({ schema: jsonSchema(city) }), stopWhen: stepCountIs(3) });
      assert.ok(made.steps.length === 3 || "city" in made.output);
    };
    calls[`${name}: two users`] = async () => assert.ok((await ask({ prompt: [...hello, ...hello] })).text);
    calls[`${name}: bad temperature`] = () => refused(() => ask({ temperature: 3 }), "temperature");
    calls[`${name}: image`] = () => refused(
      () => ask({ prompt: [{ role: "user", content: [{ type: "image", image }] }] }), "content[0]", "image",
    );
  }
  calls.embeddings = () => refused(
    () => embed({ model: compatible.textEmbeddingModel(model), value: "?", maxRetries: 0 }), "nothing at /v1/embeddings",
  );
  return calls;
}

globalThis.AI_SDK_LOG_WARNINGS = false;
const results = {};
for (const [name, call] of Object.entries(await { openai: official, ai: vercel }[client]())) {
  results[name] = await call().then(() => "", (error) => `${error.name}: ${error.message} ${error.responseBody ?? ""}`);
}
console.log(JSON.stringify(results));
process.exit(0);
