// Responses that go on from each other, and conversations.

import assert from "node:assert/strict";
import { test } from "node:test";

import OpenAI from "openai";

import { citySchema, client, isCity, isWeatherCall, model, responseTool } from "./support.mjs";

const short = { model, max_output_tokens: 4, temperature: 0 };
const cached = (response) => response.usage.input_tokens_details.cached_tokens;

test("fifty turns compute only what is new", async () => {
  let last = null;
  for (let turn = 0; turn < 50; turn += 1) {
    const response = await client.responses.create({
      ...short,
      input: `This is message number ${turn + 100}. Please answer it.`,
      previous_response_id: last?.id,
    });
    if (last) {
      // The last token of an answer is computed with what follows it.
      assert.ok(cached(response) >= last.usage.total_tokens - 1);
      assert.ok(response.usage.input_tokens - cached(response) < 40);
    }
    last = response;
  }
  assert.ok(last.usage.dropped_tokens > 0, "the history has outgrown the window");
});

test("an earlier response is a branch point", async () => {
  const first = await client.responses.create({ ...short, input: "I am Ada.", instructions: "Be brief." });
  const next = { ...short, input: "Who am I?", previous_response_id: first.id };
  const once = await client.responses.create(next);
  const twice = await client.responses.create(next);
  assert.equal(once.output_text, twice.output_text);
  assert.ok(cached(twice) >= first.usage.total_tokens - 1);
});

test("responses are kept until they are deleted", async () => {
  const made = await client.responses.create({ ...short, input: "Hello" });
  const found = await client.responses.retrieve(made.id);
  assert.equal(found.output_text, made.output_text);
  await client.responses.delete(made.id);
  await assert.rejects(client.responses.retrieve(made.id), OpenAI.NotFoundError);
});

test("a stream has typed events", async () => {
  const stream = await client.responses.create({ ...short, input: "Count to three.", stream: true });
  const events = [];
  for await (const event of stream) events.push(event);
  assert.deepEqual(
    events.map((event) => event.sequence_number),
    events.map((_, index) => index),
  );
  assert.equal(events[0].type, "response.created");
  const final = events.at(-1);
  assert.ok(["response.completed", "response.incomplete"].includes(final.type));
  const deltas = events.filter((event) => event.type === "response.output_text.delta");
  assert.equal(deltas.map((event) => event.delta).join(""), final.response.output[0].content[0].text);
});

test("a JSON schema is kept to", async () => {
  const response = await client.responses.create({
    model,
    input: "Tell me about Paris as JSON.",
    text: { format: { type: "json_schema", name: "city", strict: true, schema: citySchema } },
    max_output_tokens: 200,
  });
  assert.equal(response.status, "completed");
  assert.ok(isCity(response.output_text), response.output_text);
});

test("a tool is called in a stream, and answers", async () => {
  const stream = client.responses.stream({
    model,
    input: "What is the weather in Paris?",
    tools: [responseTool],
    tool_choice: "required",
    parallel_tool_calls: false,
    max_output_tokens: 80,
    temperature: 0,
  });
  let pieces = "";
  stream.on("response.function_call_arguments.delta", (event) => {
    pieces += event.delta;
  });
  const asked = await stream.finalResponse();
  const [call] = asked.output;
  assert.equal(call.type, "function_call");
  assert.equal(call.arguments, pieces);
  assert.ok(isWeatherCall(call.name, call.arguments), call.arguments);
  const answered = await client.responses.create({
    ...short,
    previous_response_id: asked.id,
    input: [{ type: "function_call_output", call_id: call.call_id, output: "18 degrees" }],
  });
  assert.ok(cached(answered) >= asked.usage.total_tokens - 1);
});

test("conversations", async () => {
  const conversation = await client.conversations.create({ metadata: { about: "rivers" } });
  const first = await client.responses.create({ ...short, input: "Name one.", conversation: conversation.id });
  const second = await client.responses.create({ ...short, input: "Another.", conversation: conversation.id });
  assert.ok(cached(second) >= first.usage.total_tokens - 1);
  const roles = [];
  for await (const item of client.conversations.items.list(conversation.id, { order: "asc" })) roles.push(item.role);
  assert.deepEqual(roles, ["user", "assistant", "user", "assistant"]);
  await client.conversations.delete(conversation.id);
  await assert.rejects(client.conversations.retrieve(conversation.id), OpenAI.NotFoundError);
});
