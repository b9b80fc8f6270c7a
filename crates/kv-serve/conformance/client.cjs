// OpenAI's own JavaScript client against kv-serve: `node client.cjs http://HOST:PORT`.

const assert = require("node:assert");
const OpenAI = require("openai").OpenAI ?? require("openai");

const base = process.argv[2].replace(/\/$/, "");
const client = new OpenAI({ baseURL: `${base}/v1`, apiKey: "none", maxRetries: 0, timeout: 120000 });
const SEA = "The sea was calm that day, and the old boat lay upon the sand. ";
const NOTE = {
  type: "function",
  function: {
    name: "note",
    parameters: {
      type: "object",
      properties: { where: { enum: ["sea", "sand"] } },
      required: ["where"],
      additionalProperties: false,
    },
  },
};
let model = null;

function ask(more = {}) {
  const messages = [{ role: "user", content: SEA }];
  return client.chat.completions.create({ model, messages, temperature: 0, max_tokens: 8, ...more });
}

const cases = {
  async models() {
    for await (const known of client.models.list()) model = known.id;
    assert(model);
  },
  async chat() {
    const answer = await ask({ kv: { policy: "snapkv", budget: 0.5 } });
    assert.equal(answer.choices[0].message.role, "assistant");
    assert(answer.usage.kv_bytes <= answer.usage.kv_full_bytes);
  },
  async stream() {
    let [text, usage] = ["", null];
    for await (const chunk of await ask({ stream: true, stream_options: { include_usage: true } })) {
      text += chunk.choices[0]?.delta.content ?? "";
      usage = chunk.usage ?? usage;
    }
    assert.equal(text, (await ask()).choices[0].message.content);
    assert(usage.completion_tokens <= 8);
  },
  async tools() {
    const answer = await ask({ tools: [NOTE], tool_choice: "required", max_tokens: 80 });
    const call = answer.choices[0].message.tool_calls[0];
    assert(["sea", "sand"].includes(JSON.parse(call.function.arguments).where));
  },
  async schema() {
    const schema = { type: "object", properties: { calm: { type: "boolean" } }, required: ["calm"],
      additionalProperties: false };
    const response_format = { type: "json_schema", json_schema: { name: "sea", schema, strict: true } };
    const answer = await ask({ response_format, max_tokens: 40 });
    assert.equal(typeof JSON.parse(answer.choices[0].message.content).calm, "boolean");
  },
  async logprobs() {
    const answer = await ask({ logprobs: true, top_logprobs: 2 });
    assert(answer.choices[0].logprobs.content.every((token) => token.top_logprobs.length === 2));
  },
  async completions() {
    const answer = await client.completions.create({ model, prompt: SEA, max_tokens: 4 });
    assert.equal(answer.object, "text_completion");
  },
  async errors() {
    await assert.rejects(ask({ max_tokens: 1000000 }), (error) => error.param === "max_tokens");
    await assert.rejects(ask({ nothing: 1 }), (error) => error.status === 400);
  },
  async abort() {
    const chunks = await ask({ stream: true, max_tokens: 400 });
    for await (const _ of chunks) break;
    await ask();
  },
};

(async () => {
  let wrong = 0;
  for (const [name, run] of Object.entries(cases)) {
    try {
      await run();
      console.log(`ok    ${name}`);
    } catch (error) {
      wrong += 1;
      console.log(`WRONG ${name}: ${error.message}`);
    }
  }
  console.log(`${Object.keys(cases).length - wrong} of ${Object.keys(cases).length} cases are right`);
  process.exit(wrong ? 1 : 0);
})();
