// SPDX-License-Identifier: Apache-2.0
// A conversation with the server of this page. All text is shown by textContent.
"use strict";

const byId = (id) => document.getElementById(id);
const turns = byId("turns");
let messages = [];
let running = null; // the AbortController of the answer that comes

function show(kind, text) {
  const turn = document.createElement("div");
  turn.className = kind;
  turn.textContent = text;
  turns.append(turn);
  turns.scrollTop = turns.scrollHeight;
  return turn;
}

function headers() {
  const key = byId("key").value.trim();
  const all = { "content-type": "application/json" };
  return key ? { ...all, authorization: `Bearer ${key}` } : all;
}

async function failure(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `status ${response.status}`;
  }
}

// The events of a stream, as objects.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (held + value).split("\n\n");
    held = parts.pop();
    for (const part of parts) {
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

async function answer() {
  const system = byId("system").value.trim();
  const body = {
    messages: system ? [{ role: "system", content: system }, ...messages] : messages,
    temperature: Number(byId("temperature").value),
    max_completion_tokens: Number(byId("max-tokens").value),
    stream: true,
    stream_options: { include_usage: true },
  };
  const turn = show("turn assistant", "");
  const start = performance.now();
  let text = "";
  try {
    const response = await fetch("v1/chat/completions", {
      method: "POST",
      headers: headers(),
      body: JSON.stringify(body),
      signal: running.signal,
    });
    if (!response.ok) throw new Error(await failure(response));
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      if (event.usage) {
        const rate = event.usage.completion_tokens / ((performance.now() - start) / 1000);
        show("note", `${event.usage.completion_tokens} tokens, ${rate.toFixed(1)} per second`);
      }
      const piece = event.choices?.[0]?.delta?.content ?? "";
      if (!piece) continue;
      const follows = turns.scrollHeight - turns.scrollTop - turns.clientHeight < 40;
      text += piece;
      turn.textContent = text;
      if (follows) turns.scrollTop = turns.scrollHeight;
    }
  } catch (error) {
    if (error.name !== "AbortError") show("turn error", error.message);
    if (!text) turn.remove();
  }
  if (text) messages.push({ role: "assistant", content: text });
}

async function send() {
  const text = byId("text").value.trim();
  if (!text || running) return;
  byId("text").value = "";
  messages.push({ role: "user", content: text });
  show("turn user", text);
  running = new AbortController();
  byId("send").hidden = true;
  byId("stop").hidden = false;
  await answer();
  running = null;
  byId("send").hidden = false;
  byId("stop").hidden = true;
  byId("text").focus();
}

byId("form").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
byId("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  }
});
byId("stop").addEventListener("click", () => running?.abort());
byId("reset").addEventListener("click", () => {
  running?.abort();
  messages = [];
  turns.replaceChildren();
});

fetch("v1/models", { headers: headers() })
  .then((response) => (response.ok ? response.json() : null))
  .then((list) => {
    if (list) byId("model").textContent = list.data[0].id;
  });
