// Errors are of the right class, and the client retries by itself.

import assert from "node:assert/strict";
import { test } from "node:test";
import { setTimeout as sleep } from "node:timers/promises";

import OpenAI from "openai";

import { client, hello, loadingUrl, model, takeAllPlaces, url } from "./support.mjs";

async function refused(asked, kind, expected) {
  await assert.rejects(asked, (error) => {
    assert.ok(error instanceof kind, `${error?.constructor?.name}: ${error?.message}`);
    assert.deepEqual(Object.keys(error.error).sort(), ["code", "message", "param", "type"]);
    for (const [name, value] of Object.entries(expected)) assert.equal(error[name], value);
    return true;
  });
}

test("a wrong key", async () => {
  const stranger = new OpenAI({ baseURL: url, apiKey: "wrong", maxRetries: 0 });
  await refused(stranger.models.list(), OpenAI.AuthenticationError, { status: 401, code: "invalid_api_key" });
});

test("bad requests name the field", async () => {
  const wanted = { model, messages: hello, max_tokens: 1 };
  for (const [fields, param] of [
    [{ temperature: 3 }, "temperature"],
    [{ frobnicate: 1 }, "frobnicate"],
    [{ reasoning_effort: "enormous" }, "reasoning_effort"],
    [{ messages: [] }, "messages"],
  ]) {
    const asked = client.chat.completions.create({ ...wanted, ...fields });
    await refused(asked, OpenAI.BadRequestError, { status: 400, param, type: "invalid_request_error" });
  }
});

test("what is not there", async () => {
  await refused(
    client.chat.completions.create({ model: "gpt-none", messages: hello }),
    OpenAI.NotFoundError,
    { status: 404, code: "model_not_found" },
  );
  await refused(
    client.responses.create({ model, input: "Hello", previous_response_id: "resp_none" }),
    OpenAI.NotFoundError,
    { status: 404, code: "previous_response_not_found", param: "previous_response_id" },
  );
});

test("a full server is told, and retried", async () => {
  const leave = await takeAllPlaces();
  const wanted = { model, messages: hello, max_tokens: 1 };
  try {
    await refused(client.chat.completions.create(wanted), OpenAI.RateLimitError, {
      status: 429,
      code: "rate_limit_exceeded",
    });
    const patient = client.withOptions({ maxRetries: 5 }).chat.completions.create(wanted);
    await sleep(300);
    leave();
    assert.equal((await patient).choices[0].message.role, "assistant");
  } finally {
    leave();
  }
});

test("a server that is loading", async () => {
  const early = new OpenAI({ baseURL: loadingUrl, apiKey: "none", maxRetries: 0 });
  await refused(early.models.list(), OpenAI.InternalServerError, { status: 503, code: "unavailable" });
});
