// Serves llama.cpp on standard input and output, one JSON line each way: tests/support/llama_cpp.py.
// node-llama-cpp is the binding; everything here is read from the GGUF file alone.
import { createRequire } from "node:module";
import { createInterface } from "node:readline";
import { join } from "node:path";
import { pathToFileURL } from "node:url";

const require = createRequire(join(process.argv[2], "anchor.js"));
const from = (name) => import(pathToFileURL(require.resolve(name)).href);
const { getLlama } = await from("node-llama-cpp");
const { Template } = await from("@huggingface/jinja");
const llama = await getLlama({ gpu: false, build: "never", skipDownload: true, logLevel: "error", maxThreads: 1 });
let model;

const verbs = {
  async open({ path }) {
    await model?.dispose();
    model = await llama.loadModel({ modelPath: path, useMmap: false });
    const { bos, eos, eot } = model.tokens;
    return { metadata: model.fileInfo.metadata, bos, eos, eot, context: model.trainContextSize };
  },
  // Ids of texts; special: whether names of control tokens in the text become those tokens.
  tokenize({ texts, special }) {
    return texts.map((text) => model.tokenize(text, special));
  },
  ends({ ids }) {
    return ids.map((id) => model.isEogToken(id));
  },
  detokenize({ ids }) {
    return model.detokenize(ids, true);
  },
  // The template of the file, as Jinja renders it.
  render({ messages, add_generation_prompt }) {
    const template = new Template(model.fileInfo.metadata.tokenizer.chat_template);
    return template.render({ messages, add_generation_prompt });
  },
  // For each position the probabilities of all tokens to be the next.  The binding keeps one place of a context free.
  async probabilities({ ids }) {
    const cache = { experimentalKvCacheKeyType: "F32", experimentalKvCacheValueType: "F32", flashAttention: false };
    const context = await model.createContext({ contextSize: ids.length + 16, threads: 1, ...cache });
    const options = { temperature: 1, topK: 0, topP: 1, minP: 0 };
    const asked = ids.map((id) => [id, { generateNext: { probabilities: true, options } }]);
    const found = await context.getSequence().controlledEvaluate(asked);
    await context.dispose();
    return found.map(({ next }) => {
      const row = [];
      for (const [id, probability] of next.probabilities) row[id] = probability;
      return row;
    });
  },
};

for await (const line of createInterface({ input: process.stdin })) {
  const { verb, ...given } = JSON.parse(line);
  try {
    console.log(JSON.stringify({ result: await verbs[verb](given) }));
  } catch (error) {
    console.log(JSON.stringify({ error: String(error?.stack ?? error) }));
  }
}
process.exit(0);
