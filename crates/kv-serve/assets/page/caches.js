// What the caches hold: of all requests, and of one by layer and head.

import { get } from "/page/api.js";

const POLL = 400;
const find = (selector) => document.querySelector(selector);

/** The job whose picture is shown. */
let shown = null;
/** Whether that job may still run, so that its picture changes. */
let runs = false;
/** Whether that job is known to have ended. */
let over = false;
/** The last picture of the shown job, drawn again when the colours change. */
let last = null;

export function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (count >= 1024 && unit < units.length - 1) {
    count /= 1024;
    unit += 1;
  }
  return `${count.toFixed(count < 10 && unit > 0 ? 1 : 0)} ${units[unit]}`;
}

/** Shows the picture of a job as long as it runs, and its last one after its end. */
export function follow(job) {
  if (String(job) !== String(last?.job)) clear(job);
  shown = job;
  runs = true;
  over = false;
  glance();
}

/** Whether the server has been asked for a picture and has not answered. */
let asks = false;

/** Asks for the shown job's picture, unless that is being asked for. */
export async function glance() {
  if (asks) return;
  asks = true;
  await picture().finally(() => (asks = false));
}

/** Takes the picture of another job away. */
function clear(job) {
  last = null;
  find("#picture").height = 0;
  find("#picture").style.height = "0";
  delete find("#picture").dataset.kept;
  find("#scale").hidden = true;
  find("#picture-text").textContent = `No picture of job ${job} yet.`;
}

/** Asks a last time for the picture of a job that has ended. */
export function leave(job) {
  // A request that was refused has no job.
  if (job === null || String(job) !== String(shown)) return;
  over = true;
  glance();
}

/** Asks the server again and again. */
export async function watch() {
  // The key that the server has refused.
  let refused = null;
  for (;;) {
    const key = find("#key").value;
    try {
      // Nobody looks at a page behind others.
      if (!document.hidden && key !== refused) {
        show(await get("/v1/kv/requests"));
        await glance();
        refused = null;
      }
    } catch (error) {
      find("#load").textContent = error.status === 401 ? "" : error.message;
      if (error.status === 401) refused = key;
    }
    await new Promise((done) => setTimeout(done, POLL));
  }
}

function bar(element, part, whole) {
  element.firstElementChild.style.width = `${whole ? Math.min(100, (100 * part) / whole) : 0}%`;
}

function show(live) {
  const rate = live.requests.reduce((sum, request) => sum + request.tokens_per_second, 0);
  find("#load").textContent =
    `${live.waiting} waiting · ${live.prefilling} in prefill · ` +
    `${live.running} of ${live.rows} decoding · ${rate.toFixed(0)} tokens/s`;
  bar(find("#total"), live.kv_bytes, live.kv_bytes_limit);
  find("#total-text").textContent =
    `${bytes(live.kv_bytes)} of ${bytes(live.kv_bytes_limit)} are reserved; ` +
    `${(100 * live.fullest).toFixed(0)} % of the fullest group`;
  const list = find("#requests");
  list.replaceChildren(...live.requests.map(item));
  if (live.requests.length === 0) {
    const none = document.createElement("li");
    none.className = "none";
    none.textContent = "None is running.";
    list.append(none);
  }
}

/** A request: its bytes as a part of the full cache's. */
function item(request) {
  const line = document.createElement("li");
  const name = document.createElement("strong");
  name.textContent = `${request.policy.policy} ${request.policy.budget ?? ""}`;
  const meter = document.createElement("div");
  meter.className = "bar";
  meter.append(document.createElement("span"));
  bar(meter, request.kv_bytes, request.kv_full_bytes);
  const tokens = request.prompt_tokens + request.new_tokens;
  line.append(
    name,
    ` · job ${request.job} · ${request.tokens_per_second.toFixed(0)} tokens/s`,
    meter,
    `${bytes(request.kv_bytes)}, full cache ${bytes(request.kv_full_bytes)} · ` +
      `${request.kv_tokens_kept.toFixed(0)} of ${tokens} tokens`,
  );
  line.setAttribute("aria-current", String(request.job) === String(shown));
  line.addEventListener("click", () => follow(request.job));
  return line;
}

async function picture() {
  if (!runs) return;
  const asked = shown;
  try {
    const next = await get(`/v1/kv/requests/${asked}`);
    if (asked !== shown) return;
    draw((last = next));
    runs = next.running;
  } catch (error) {
    if (error.status !== 404 || asked !== shown) return;
    // A job that was there ended long ago, and its last picture stays; another one has not begun.
    runs = !over && String(last?.job) !== String(asked);
    if (over && last === null) {
      find("#picture-text").textContent = `Job ${asked} ended before it had a row.`;
    }
  }
}

function draw(picture) {
  const { kept, tokens, job } = picture;
  const canvas = find("#picture");
  const heads = Math.max(...kept.map((layer) => layer.length));
  const cell = Math.max(4, Math.min(40, Math.floor(360 / kept.length), Math.floor(240 / heads)));
  const scale = window.devicePixelRatio || 1;
  const [width, height] = [cell * kept.length, cell * heads];
  Object.assign(canvas, { width: width * scale, height: height * scale });
  Object.assign(canvas.style, { width: `${width}px`, height: `${height}px` });
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  const most = Math.max(1, ...kept.flat());
  const colours = getComputedStyle(document.querySelector(".ramp"));
  const [low, high] = colours.backgroundImage.match(/rgba?\([^)]*\)/g) ?? ["#ddd", "#077"];
  kept.forEach((layer, x) =>
    layer.forEach((count, y) => {
      for (const [colour, part] of [[low, 1], [high, count / most]]) {
        context.globalAlpha = part;
        context.fillStyle = colour;
        context.fillRect(x * cell, y * cell, cell - 1, cell - 1);
      }
    }),
  );
  const mean = kept.flat().reduce((sum, count) => sum + count, 0) / kept.flat().length;
  find("#picture-text").textContent =
    `Job ${job}: ${kept.length} layers to the right, ${heads} heads down; ` +
    `${mean.toFixed(0)} of ${tokens} tokens on average.`;
  canvas.dataset.kept = JSON.stringify(kept);
  find("#scale").hidden = false;
  find("#scale-most").textContent = `${most} tokens`;
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => last && draw(last));
