// The page of the API, made from openapi.json.

import { get } from "./api.js";
import { byId, el } from "./dom.js";
import { load, settings } from "./settings.js";

const EXAMPLES = {
  "/v1/chat/completions": { messages: [{ role: "user", content: "Who are you?" }] },
  "/v1/completions": { prompt: "Once upon a time", max_tokens: 50 },
  "/v1/responses": { input: "Who are you?" },
  "/tokenize": { prompt: "Once upon a time" },
  "/detokenize": { tokens: [72, 105] },
};

let shared = {};

/** A schema in words: its type, its values, its range. */
function words(schema) {
  if (schema.$ref) return words(shared[schema.$ref.split("/").at(-1)]);
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(", ");
  const choices = schema.anyOf ?? schema.oneOf;
  if (choices) return [...new Set(choices.filter((one) => one.type !== "null").map(words))].join(", or ") || "only null";
  const low = schema.minimum ?? schema.exclusiveMinimum;
  const high = schema.maximum ?? schema.exclusiveMaximum;
  const wide = Math.abs(low) > Number.MAX_SAFE_INTEGER;
  const range = wide ? "" : low !== undefined && high !== undefined ? `, ${low} to ${high}` : low !== undefined ? `, ${low} or more` : "";
  if (schema.type === "array") return `list of: ${words(schema.items ?? {})}`;
  if (schema.type === "object") return schema.title && schema.properties ? `object: ${Object.keys(schema.properties).join(", ")}` : "object";
  return `${schema.type ?? "anything"}${range}`;
}

function table(schema) {
  const rows = Object.entries(schema.properties).map(([name, one]) => el("tr", {},
    el("td", { text: name }), el("td", { text: (schema.required?.includes(name) ? "required: " : "") + words(one) })));
  const head = el("tr", {}, el("th", { scope: "col", text: "field" }), el("th", { scope: "col", text: "value" }));
  return el("table", {}, el("thead", {}, head), el("tbody", {}, ...rows));
}

function example(path, method, model) {
  const key = settings.key === "" ? "" : " -H 'Authorization: Bearer KEY'";
  const url = location.origin + path.replace("{model}", model);
  if (method === "get") return `curl ${url}${key}`;
  const body = JSON.stringify({ model, ...EXAMPLES[path] });
  return `curl ${url}${key} -H 'Content-Type: application/json' \\\n  -d '${body}'`;
}

async function main() {
  load();
  byId("base").textContent = `${location.origin}/v1`;
  const found = await get("/openapi.json").catch((error) => {
    const key = error.status === 401 ? " Enter the key in the settings of the chat page, then come back in the same tab." : "";
    throw new Error(error.message + key);
  });
  shared = found.components.schemas;
  const posts = Object.entries(found.paths).filter(([, methods]) => methods.post);
  const model = posts[0][1].post.requestBody.content["application/json"].schema.properties.model.enum[0];
  const gets = Object.entries(found.paths).filter(([, methods]) => !methods.post);
  for (const [path, methods] of [...posts, ...gets]) {
    const [method, told] = Object.entries(methods)[0];
    const schema = told.requestBody?.content["application/json"].schema;
    byId("paths").append(el("section", {},
      el("h2", { text: `${method.toUpperCase()} ${path}` }), el("p", { text: told.summary }),
      el("pre", { tabindex: 0, text: example(path, method, model) }),
      schema ? el("details", {}, el("summary", { text: "Fields" }), table(schema)) : null));
  }
}

main().catch((error) => {
  byId("problem").textContent = error.message;
  byId("problem").hidden = false;
});
