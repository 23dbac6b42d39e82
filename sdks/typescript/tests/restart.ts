/** A stream whose server is killed and started again by `tests/conformance/test_sdks.py`. */

import { Client, type Session } from "kakeya";
import { PROMPT } from "./support.js";

const COUNT = 1500;
const EARLY = 20;

async function begun(client: Client): Promise<Session> {
  const session = await client.createSession({ ignoreEos: true });
  await session.append(PROMPT);
  return session;
}

// On a busy machine a server takes longer to come back than a client waits that was told nothing.
const retry = { attempts: 60, longestDelayMs: 1000 };
await using client = new Client({ address: process.argv[2], retry });
const session = await begun(client);
const stream = session.generate(COUNT);
const said: number[] = [];
for await (const token of stream) {
  said.push(token.id);
  if (said.length === EARLY) {
    console.log("streaming");
  }
}
const uninterrupted: number[] = [];
for await (const token of (await begun(client)).generate(COUNT)) {
  uninterrupted.push(token.id);
}
// As another program would, which knows nothing but the id.
await using other = new Client({ address: process.argv[2] });
const { historyLength } = await other.session(session.sessionId).info();
const { stopReason } = stream.result ?? {};
console.log(JSON.stringify({ said, uninterrupted, historyLength, stopReason, promptLength: PROMPT.length }));
