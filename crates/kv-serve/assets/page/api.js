// The server's API: requests, and streams of server-sent events.

/** What an error's body says, or the status. */
async function failure(response) {
  if (response.status === 401) {
    return "This server wants an API key: write it into the field API key, below the message.";
  }
  try {
    return (await response.json()).error.message;
  } catch {
    return `the server answered ${response.status}`;
  }
}

/** A request; throws an `Error` with the server's words and the answer's `status`. */
async function send(path, options = {}) {
  const headers = { ...options.headers };
  const key = document.querySelector("#key").value;
  if (key) headers.authorization = `Bearer ${key}`;
  const response = await fetch(path, { ...options, headers });
  if (!response.ok) {
    throw Object.assign(new Error(await failure(response)), { status: response.status });
  }
  return response;
}

/** The JSON at a path. */
export async function get(path) {
  return (await send(path)).json();
}

/**
 * Streams a chat. Calls `begun(jobs)` with the engine's numbers of its jobs, then `event(chunk)`
 * for each event.
 */
export async function stream(body, signal, begun, event) {
  const response = await send("/v1/chat/completions", {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify({ ...body, stream: true, stream_options: { include_usage: true } }),
    signal,
  });
  begun((response.headers.get("x-kv-jobs") ?? "").split(","));
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      // Lines that begin with a colon keep the connection alive.
      const lines = block.split("\n").filter((line) => line.startsWith("data: "));
      const data = lines.map((line) => line.slice(6)).join("\n");
      if (data === "" || data === "[DONE]") continue;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      event(chunk);
    }
  }
}
