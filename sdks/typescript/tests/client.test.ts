/** The client's own: settings, signals, a server that is not there, encryption. */

import assert from "node:assert/strict";
import { getEventListeners } from "node:events";
import { createServer } from "node:http2";
import type { AddressInfo } from "node:net";
import { join } from "node:path";
import { test } from "node:test";
import { setTimeout as sleep } from "node:timers/promises";
import {
  Client,
  type ClientOptions,
  ComeBackLater,
  ConfigError,
  InvalidArgument,
  KakeyaError,
  Restarting,
  Unauthenticated,
  Unavailable,
} from "kakeya";
import { connect, IMPATIENT, LONG, NOWHERE, PROMPT } from "./support.js";

test("settings that cannot work are refused by name", () => {
  const bad: [ClientOptions, RegExp][] = [
    [{ address: "nowhere" }, /address must be a host and a port/],
    [{ address: "http://127.0.0.1:1" }, /address/],
    [{ apiKey: "a\nb" }, /apiKey/],
    [{ model: "größe" }, /model must be printable ASCII, got "größe"/],
    [{ model: "" }, /model must be printable ASCII, got ""/],
    [{ retry: { attempts: 0 } }, /retry.attempts must be at least 1, got 0/],
    [{ retry: { firstDelayMs: 9, longestDelayMs: 3 } }, /firstDelayMs <= longestDelayMs, got 9 and 3/],
    [{ keepalive: { intervalMs: 0 } }, /keepalive/],
    [{ timeoutMs: -1 }, /timeoutMs must not be negative/],
    [{ tls: { caFile: "nowhere.pem" } }, /cannot read the TLS file nowhere.pem/],
    [{ tls: { certFile: "alone.pem" } }, /together/],
  ];
  for (const [options, message] of bad) {
    assert.throws(
      () => new Client(options),
      (error) => error instanceof ConfigError && message.test(error.message),
    );
  }
  new Client({ address: "[::1]:50051", tls: true, timeoutMs: null }).close();
});

test("an option that there is not is refused by name", async () => {
  const settings: [object, string][] = [
    [{ apikey: "k" }, "Client has no option apikey"],
    [{ retry: { tries: 2 } }, "retry has no option tries"],
    [{ keepalive: { pace: 2 } }, "keepalive has no option pace"],
    [{ tls: { ca: "ca.pem" } }, "tls has no option ca"],
  ];
  for (const [options, message] of settings) {
    assert.throws(() => new Client(options), { name: "TypeError", message });
  }
  await using client = connect();
  await using session = await client.createSession();
  const odd: object = { timeout: 5 }; // as plain JavaScript gives it
  const refused = { name: "TypeError", message: "this call has no option timeout" };
  await assert.rejects(client.createSession(odd), refused);
  await assert.rejects(client.createSession({ system: "Be brief.", ...odd }), refused);
  await assert.rejects(client.importSession(new Uint8Array(1), odd), refused);
  await assert.rejects(client.listSessions(odd), refused);
  await assert.rejects(session.append(PROMPT, odd), refused);
  await assert.rejects(session.recall([], odd), refused);
  await assert.rejects(session.info(odd), refused);
  await assert.rejects(session.fork(odd), refused);
  await assert.rejects(session.export(odd), refused);
  await assert.rejects(session.close(odd), refused);
  assert.throws(() => session.chat("Hello", odd), { message: "generate has no option timeout" });
  assert.equal((await session.info()).historyLength, 0);
});

test("a server that is not there", async () => {
  await using client = connect({ address: NOWHERE, retry: IMPATIENT });
  await assert.rejects(client.serverInfo(), (error) => {
    assert.ok(error instanceof Unavailable && error instanceof ComeBackLater && error instanceof KakeyaError);
    assert.equal(error.name, "Unavailable");
    assert.equal(error.status, "UNAVAILABLE");
    assert.match(String(error.cause), /ECONNREFUSED/);
    return true;
  });
});

test("a server that says that it restarts is waited for", async () => {
  let asked = 0;
  const server = createServer((_, response) => {
    asked += 1;
    const said = asked < 5 ? { "grpc-status": "14", "kakeya-error": "Restarting" } : { "grpc-status": "16" };
    response.writeHead(200, { "content-type": "application/grpc+proto", ...said }).end();
  });
  await new Promise<void>((listening) => server.listen(0, "127.0.0.1", listening));
  const address = `127.0.0.1:${(server.address() as AddressInfo).port}`;
  try {
    await using client = connect({ address, retry: IMPATIENT });
    await assert.rejects(client.serverInfo(), Unauthenticated);
    assert.equal(asked, 5);
    asked = 0;
    await using hasty = connect({ address, retry: { attempts: 1 } });
    await assert.rejects(hasty.serverInfo(), Restarting);
  } finally {
    server.close();
  }
});

test("a signal ends the pause between two tries", async () => {
  const retry = { attempts: 9, firstDelayMs: 60_000, longestDelayMs: 60_000 };
  await using client = connect({ address: NOWHERE, retry, timeoutMs: null });
  const stop = new AbortController();
  const asking = client.serverInfo({ signal: stop.signal });
  setTimeout(() => stop.abort(new Error("enough")), 30);
  await assert.rejects(asking, /enough/);
  await assert.rejects(client.listSessions({ signal: stop.signal }), /enough/);
  const waiting = client.serverInfo();
  setTimeout(() => client.close(), 30);
  await assert.rejects(waiting, /closed during the call/);
});

test("many calls may wait for one signal, and let go of it", async () => {
  const warnings: Error[] = [];
  const hear = (warning: Error) => warnings.push(warning);
  process.on("warning", hear);
  const stop = new AbortController();
  const many = Array.from({ length: 20 });
  await using absent = connect({ address: NOWHERE, retry: IMPATIENT });
  await using client = connect();
  await using session = await client.createSession({ ignoreEos: true });
  await session.append(PROMPT);
  const { signal } = stop;
  await Promise.all(many.map(() => assert.rejects(absent.serverInfo(), Unavailable)));
  await Promise.all(many.map(() => client.tokenizer({ signal })));
  await Promise.all(many.map(() => session.info({ signal })));
  const forks = await Promise.all(many.map(() => session.fork({ signal })));
  await Promise.all(
    forks.map(async (fork) => {
      await using stream = fork.generate(LONG, { signal });
      await stream.next();
    }),
  );
  await Promise.all(forks.map((fork) => fork.close({ signal })));
  await sleep(0); // warnings come in the next turn of the loop
  process.off("warning", hear);
  assert.deepEqual(warnings, []);
  assert.equal(getEventListeners(signal, "abort").length, 0);
});

test("no try is begun that would come too late", async () => {
  const retry = { attempts: 9, firstDelayMs: 60_000, longestDelayMs: 60_000 };
  await using client = connect({ address: NOWHERE, retry, timeoutMs: 500 });
  await assert.rejects(client.serverInfo(), Unavailable);
  await using present = connect();
  await assert.rejects(present.serverInfo({ timeoutMs: 0 }), { name: "DeadlineExceeded", status: "DEADLINE_EXCEEDED" });
});

test("numbers of 64 bits", async () => {
  await using client = connect();
  await using session = await client.createSession({ ignoreEos: true });
  await session.append(PROMPT);
  const stream = session.generate(1, { seed: 2n ** 64n - 1n, temperature: 1 });
  assert.equal((await stream.next()).done, false);
  assert.equal((await stream.next()).done, true);
  assert.throws(() => session.generate(2, { seed: 2n ** 64n }), InvalidArgument);
  assert.throws(() => session.generate(2, { seed: 0.5 }), InvalidArgument);
});

test("a tokenizer that could not be fetched is asked for again", async () => {
  await using client = connect({ address: NOWHERE, retry: IMPATIENT });
  await assert.rejects(client.tokenizer(), Unavailable);
  await assert.rejects(client.createSession({ system: "Be brief." }), Unavailable);
});

test("a tokenizer is fetched once, and refuses what is no text", async () => {
  await using client = connect();
  const stop = new AbortController();
  const impatient = client.tokenizer({ signal: stop.signal });
  const patient = client.tokenizer();
  stop.abort(new Error("enough"));
  await assert.rejects(impatient, /enough/);
  const tokenizer = await patient;
  assert.equal(await client.tokenizer(), tokenizer);
  assert.equal(tokenizer.vocabSize, 49152);
  assert.equal(tokenizer.eosId, 2);
  assert.throws(() => tokenizer.encode("half \ud83d"), InvalidArgument);
});

test("encryption proves the server, and the client where it is asked to", async (t) => {
  const { KAKEYA_PAPERS: papers, KAKEYA_TLS: address, KAKEYA_MUTUAL_TLS: mutual } = process.env;
  if (papers === undefined || address === undefined || mutual === undefined) {
    t.skip("needs a server with TLS");
    return;
  }
  const caFile = join(papers, "authority.pem");
  const known = { caFile, certFile: join(papers, "client.pem"), keyFile: join(papers, "client.key") };
  const served = async (to: string, tls: ClientOptions["tls"]) => {
    await using client = connect({ address: to, tls, retry: { attempts: 1 } });
    return (await client.serverInfo()).capacity;
  };
  assert.equal(await served(address, { caFile }), 64);
  assert.equal(await served(mutual, known), 64);
  await assert.rejects(served(address, { caFile: join(papers, "other-authority.pem") }), Unavailable);
  await assert.rejects(served(address, true), Unavailable);
  await assert.rejects(served(address, false), Unavailable);
  await assert.rejects(served(mutual, { caFile }), Unavailable);
});
