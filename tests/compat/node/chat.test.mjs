// Chat completions, completions and models.

import assert from "node:assert/strict";
import { test } from "node:test";

import { chatTool, citySchema, client, hello, isCity, isWeatherCall, model, weatherQuestion } from "./support.mjs";

test("models are listed and found", async () => {
  const listed = [];
  for await (const each of client.models.list()) listed.push(each.id);
  assert.deepEqual(listed, [model]);
  const found = await client.models.retrieve(model);
  assert.equal(found.owned_by, "kakeya");
});

test("a chat is answered, and goes on where it was", async () => {
  const wanted = { model, max_completion_tokens: 8, temperature: 0 };
  const first = await client.chat.completions.create({ ...wanted, messages: hello });
  assert.ok(first.choices[0].message.content.length > 0);
  const messages = [...hello, first.choices[0].message, { role: "user", content: "And goodbye?" }];
  const second = await client.chat.completions.create({ ...wanted, messages });
  const cached = second.usage.prompt_tokens_details.cached_tokens;
  assert.ok(cached >= first.usage.total_tokens - 1, `${cached} of ${first.usage.total_tokens}`);
});

test("a stream says the same and ends with usage", async () => {
  const wanted = { model, messages: hello, max_tokens: 12, temperature: 0 };
  const whole = await client.chat.completions.create(wanted);
  const stream = await client.chat.completions.create({
    ...wanted,
    stream: true,
    stream_options: { include_usage: true },
  });
  let told = "";
  let usage;
  for await (const chunk of stream) {
    told += chunk.choices[0]?.delta.content ?? "";
    usage = chunk.usage ?? usage;
  }
  assert.equal(told, whole.choices[0].message.content);
  assert.equal(usage.completion_tokens, whole.usage.completion_tokens);
});

test("a required tool is called", async () => {
  const completion = await client.chat.completions.create({
    model,
    messages: weatherQuestion,
    tools: [chatTool],
    tool_choice: "required",
    parallel_tool_calls: false,
    max_tokens: 80,
    temperature: 0,
  });
  const [choice] = completion.choices;
  assert.equal(choice.finish_reason, "tool_calls");
  assert.equal(choice.message.tool_calls.length, 1);
  const { name, arguments: text } = choice.message.tool_calls[0].function;
  assert.ok(isWeatherCall(name, text), text);
});

test("the runner for tools calls a function and sends back what it gave", async () => {
  const asked = [];
  const runner = client.chat.completions.runTools(
    {
      model,
      messages: weatherQuestion,
      max_tokens: 80,
      temperature: 0,
      stream: true,
      tool_choice: { type: "function", function: { name: "get_weather" } },
      tools: [
        {
          type: "function",
          function: {
            ...chatTool.function,
            parse: JSON.parse,
            function: ({ city, unit }) => {
              asked.push(city);
              return `18 ${unit} in ${city}`;
            },
          },
        },
      ],
    },
    { maxChatCompletions: 1 },
  );
  const pieces = [];
  for await (const chunk of runner) {
    const call = chunk.choices[0]?.delta.tool_calls?.[0];
    if (call) pieces.push(call.function.arguments ?? "");
  }
  await runner.done();
  assert.equal(asked.length, 1);
  assert.ok(pieces.length > 2, "the arguments come in pieces");
  assert.equal(JSON.parse(pieces.join("")).city, asked[0]);
  assert.equal(runner.messages.at(-1).role, "tool");
});

test("a JSON schema is kept to, and parsed", async () => {
  const wanted = {
    model,
    messages: [{ role: "user", content: "Tell me about Paris as JSON." }],
    response_format: { type: "json_schema", json_schema: { name: "city", strict: true, schema: citySchema } },
    max_tokens: 200,
  };
  for (const seed of [1, 2, 3]) {
    const completion = await client.chat.completions.create({ ...wanted, temperature: 1.5, seed });
    assert.equal(completion.choices[0].finish_reason, "stop");
    assert.ok(isCity(completion.choices[0].message.content), completion.choices[0].message.content);
  }
  const parsed = await client.chat.completions.parse({ ...wanted, temperature: 0 });
  assert.equal(parsed.choices[0].finish_reason, "stop");
});

test("a JSON object is begun", async () => {
  const completion = await client.chat.completions.create({
    model,
    messages: [{ role: "user", content: 'Answer with {"a": 1} only.' }],
    response_format: { type: "json_object" },
    max_tokens: 30,
  });
  const [choice] = completion.choices;
  assert.ok(choice.message.content.startsWith("{"));
  if (choice.finish_reason === "stop") assert.equal(typeof JSON.parse(choice.message.content), "object");
});

test("text is scored", async () => {
  const prompt = "The capital of France is Paris";
  const scored = await client.completions.create({ model, prompt, echo: true, logprobs: 1, max_tokens: 0 });
  const { text, logprobs } = scored.choices[0];
  assert.equal(text, prompt);
  assert.equal(logprobs.tokens.join(""), prompt);
  assert.equal(logprobs.token_logprobs[0], null);
  assert.ok(logprobs.token_logprobs.slice(1).every((logprob) => logprob < 0));
});
