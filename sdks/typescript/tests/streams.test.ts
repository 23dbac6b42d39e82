/** Streams as JavaScript knows them: signals, `break`, `await using`, garbage. */

import assert from "node:assert/strict";
import { test } from "node:test";
import { setTimeout as sleep } from "node:timers/promises";
import { type Client, type Session, type Stream, type Token, Unavailable } from "kakeya";
import { connect, LONG, PROMPT } from "./support.js";

async function withPrompt(client: Client): Promise<Session> {
  const session = await client.createSession({ ignoreEos: true });
  await session.append(PROMPT);
  return session;
}

async function read(stream: Stream<Token>): Promise<number> {
  let count = 0;
  for await (const _token of stream) {
    count += 1;
  }
  return count;
}

test("leaving a loop by break or by an error cancels the work", async () => {
  await using client = connect();
  await using session = await withPrompt(client);
  for await (const _token of session.generate(LONG)) {
    break;
  }
  assert.equal(session.lastResult, undefined);
  await assert.rejects(async () => {
    for await (const _token of session.generate(LONG)) {
      throw new RangeError("the reader's own");
    }
  }, RangeError);
  assert.ok((await session.append([7])) < LONG);
});

test("an aborted signal ends the iteration with its reason, and the session stays usable", async () => {
  await using client = connect();
  await using session = await withPrompt(client);
  const stop = new AbortController();
  const stream = session.generate(LONG, { signal: stop.signal });
  await stream.next();
  stop.abort(new Error("enough"));
  await assert.rejects(read(stream), /enough/);
  assert.equal(stream.result, undefined);
  await assert.rejects(read(session.generate(1, { signal: stop.signal })), /enough/);
  assert.equal(await read(session.generate(3)), 3);
});

test("a signal that times out wakes a reader who waits", async () => {
  await using client = connect();
  await using session = await withPrompt(client);
  await assert.rejects(read(session.generate(LONG, { signal: AbortSignal.timeout(100) })), { name: "TimeoutError" });
  assert.ok((await session.append([])) < LONG);
});

test("a signal is let go of when the stream ends", async () => {
  await using client = connect();
  await using session = await withPrompt(client);
  const stop = new AbortController();
  const stream = session.generate(3, { signal: stop.signal });
  assert.equal(await read(stream), 3);
  stop.abort();
  assert.equal(stream.result?.stopReason, "MAX_TOKENS");
  assert.equal(await read(session.generate(1)), 1);
});

test("await using leaves a stream and closes a session", async () => {
  await using client = connect();
  let sessionId: string;
  {
    await using session = await withPrompt(client);
    sessionId = session.sessionId;
    {
      await using stream = session.generate(LONG);
      await stream.next();
    }
    assert.ok((await session.append([])) < LONG);
  }
  await assert.rejects(client.session(sessionId).info(), { name: "SessionNotFound", status: "NOT_FOUND" });
  const closed = await client.createSession();
  await closed.close();
  await closed[Symbol.asyncDispose]();
});

test("a stream can be left while it is being read", async () => {
  await using client = connect();
  await using session = await withPrompt(client);
  const stream = session.generate(LONG);
  await stream.next();
  const reading = read(stream);
  await stream.return();
  assert.ok((await reading) < LONG);
  assert.ok((await session.append([3])) < LONG);
});

test("a stream that nobody holds any more is cancelled", async (t) => {
  const { gc } = globalThis;
  if (gc === undefined) {
    t.skip("needs node --expose-gc");
    return;
  }
  await using client = connect();
  await using session = await withPrompt(client);
  const begin = async () => (await session.generate(LONG).next()).done;
  assert.equal(await begin(), false);
  for (let tries = 0; (await session.info()).state !== "idle"; tries += 1) {
    assert.ok(tries < 200, "the work went on");
    gc();
    await sleep(10);
  }
  assert.ok((await session.append([3])) < LONG);
});

test("closing the client ends what runs", async () => {
  const client = connect();
  const session = await withPrompt(client);
  const stream = session.generate(LONG);
  await stream.next();
  const reading = read(stream);
  await sleep(10);
  client.close();
  await assert.rejects(reading, Unavailable);
  await assert.rejects(session.info(), /this client is closed/);
  await using again = connect();
  await again.session(session.sessionId).close();
});
