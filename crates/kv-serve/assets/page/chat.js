// The chat.

import { get, stream } from "/page/api.js";
import { bytes, follow, glance, leave, watch } from "/page/caches.js";

const find = (selector) => document.querySelector(selector);
/** The conversation so far, as the API takes it. */
let messages = [];
/** What stops the running answer. */
let running = null;

function add(role, text) {
  const message = document.createElement("article");
  message.className = `message ${role}`;
  const [body, meta] = [document.createElement("div"), document.createElement("p")];
  body.className = "text";
  body.textContent = text;
  meta.className = "meta";
  message.append(body, meta);
  find("#log").append(message);
  message.scrollIntoView({ block: "end" });
  return { message, body, meta };
}

/** The `kv` of a request: what the user has chosen. The server has its own for what is left out. */
function cache() {
  const budget = find("#budget").value.trim();
  const policy = find("#policy").value || undefined;
  if (budget === "") return { policy };
  if (!/^(\d+|\d*\.\d+)$/.test(budget)) {
    throw new Error(`${budget} is no budget: write a share, as 0.25, or a number of tokens, as 512`);
  }
  // JavaScript writes 1.0 as 1, which is one token; all tokens are what `full` keeps.
  if (Number(budget) === 1 && budget.includes(".")) return { policy: "full" };
  return { policy, budget: Number(budget) };
}

async function answer() {
  const own = add("assistant", "");
  // A new chat has other messages.
  const conversation = messages;
  const begun = performance.now();
  let [first, count, usage] = [null, 0, null];
  let followed = null;
  const begin = ([job]) => follow((followed = job));
  running = new AbortController();
  try {
    const body = {
      messages: conversation,
      temperature: Number(find("#temperature").value),
      max_tokens: Number(find("#most").value),
      kv: cache(),
    };
    await stream(body, running.signal, begin, (chunk) => {
      usage = chunk.usage ?? usage;
      const text = chunk.choices[0]?.delta.content;
      if (!text) return;
      first ??= performance.now();
      count += 1;
      own.body.textContent += text;
      // A short answer ends before the page would ask again.
      glance();
      const seconds = (performance.now() - first) / 1000;
      if (count > 1) own.meta.textContent = `${((count - 1) / seconds).toFixed(0)} tokens/s`;
      own.message.scrollIntoView({ block: "end" });
    });
    if (usage) own.meta.textContent = told(usage, begun, first);
  } catch (error) {
    if (error.name !== "AbortError") {
      own.message.classList.add("wrong");
      own.body.textContent += error.message;
      own.message.scrollIntoView({ block: "end" });
      giveBack(conversation.pop().content);
      return;
    }
    own.meta.textContent = "stopped";
  } finally {
    running = null;
    leave(followed);
  }
  conversation.push({ role: "assistant", content: own.body.textContent });
}

/** Puts a refused message back into the input box, unless another one is being written there. */
function giveBack(text) {
  const prompt = find("#prompt");
  if (prompt.value === "") prompt.value = text;
}

/** What a request took, in words. */
function told(usage, begun, first) {
  const rest = (performance.now() - (first ?? begun)) / 1000;
  const rate = usage.completion_tokens > 1 ? (usage.completion_tokens - 1) / rest : 0;
  const parts = [
    `kept ${usage.kv_tokens_kept.toFixed(0)} of ${usage.total_tokens} tokens`,
    `${bytes(usage.kv_bytes)} instead of ${bytes(usage.kv_full_bytes)}`,
    first === null ? "" : `first token in ${(first - begun).toFixed(0)} ms`,
    rate > 0 ? `${rate.toFixed(0)} tokens/s` : "",
  ];
  return parts.filter(Boolean).join(" · ");
}

async function submit(event) {
  event.preventDefault();
  const prompt = find("#prompt");
  const text = prompt.value;
  if (running || text === "") return;
  add("user", text);
  messages.push({ role: "user", content: text });
  prompt.value = "";
  find("#send").disabled = true;
  find("#stop").disabled = false;
  await answer();
  find("#send").disabled = false;
  find("#stop").disabled = true;
  prompt.focus();
}

/** Whether the model is the embedded one. */
let isEmbedded = false;
/** What a sample has changed, until a new chat. */
let before = null;

/** A story that hides a number, in the words that the embedded model knows. */
function sample() {
  const sentence = "The sea was calm that day, and the old boat lay upon the sand. ";
  const number = 10000 + Math.floor(Math.random() * 90000);
  find("#prompt").value =
    `${sentence.repeat(12)}\nThe secret number of the clever fiddle is ${number}.\n` +
    `${sentence.repeat(12)}\nQuestion: What is the secret number of the clever fiddle?\nAnswer: `;
  const [most, policy] = [find("#most"), find("#policy")];
  before ??= { most: most.value, policy: policy.value };
  // The embedded model says the number alone; others make a sentence of it.
  most.value = isEmbedded ? 5 : 32;
  // KeyDiff keeps keys that differ from the others, such as a number's in a story that repeats.
  if ([...policy.options].some((option) => option.value === "keydiff")) policy.value = "keydiff";
  explain();
}

/** Undoes what the sample has set. */
function restore() {
  if (before === null) return;
  find("#most").value = before.most;
  find("#policy").value = before.policy;
  explain();
  before = null;
}

/** Says what the chosen policy does. */
function explain() {
  find("#policy-text").textContent = find("#policy").selectedOptions[0]?.title ?? "";
}

async function begin() {
  find("#policy").addEventListener("change", explain);
  find("#form").addEventListener("submit", submit);
  find("#prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) submit(event);
  });
  find("#stop").addEventListener("click", () => running?.abort());
  find("#sample").addEventListener("click", sample);
  find("#clear").addEventListener("click", () => {
    running?.abort();
    messages = [];
    find("#log").replaceChildren();
    restore();
  });
  find("#key").addEventListener("change", describe);
  watch();
  await describe();
  document.documentElement.dataset.ready = "true";
}

/** The model and the policies. */
async function describe() {
  try {
    const [health, models, known] = await Promise.all(
      ["/health", "/v1/models", "/v1/kv/policies"].map(get),
    );
    const { max_model_len: positions, max_tokens: limit } = models.data[0];
    const most = find("#most");
    most.max = limit;
    most.value = Math.min(Number(most.value), limit);
    isEmbedded = health.model === "needle-1m";
    find("#model").textContent = `${health.model} on ${health.device}, ${positions} positions`;
    const options = known.policies.filter((policy) => policy.required.length === 0);
    const own = new Option(`server's (${known.default.policy})`, "");
    const summary = known.policies.find((policy) => policy.name === known.default.policy)?.summary;
    own.title = `${summary ?? ""} ${JSON.stringify(known.default)}`.trim();
    find("#policy").replaceChildren(own, ...options.map((policy) => {
      const option = new Option(policy.name, policy.name);
      option.title = policy.summary;
      return option;
    }));
    explain();
  } catch (error) {
    find("#model").textContent = error.message;
  }
}

begin();
