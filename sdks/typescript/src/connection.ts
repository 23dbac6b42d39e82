/** One connection to a server: calls with a key, a deadline and retries. */

import { setMaxListeners } from "node:events";
import { setTimeout as sleep } from "node:timers/promises";
import { createClient, type Client as RpcClient, type CallOptions as RpcOptions } from "@connectrpc/connect";
import { createGrpcTransport, Http2SessionManager } from "@connectrpc/connect-node";
import { Conflict, DeadlineExceeded, HistoryMismatch, KakeyaError, Restarting, Unavailable } from "./errors.js";
import { translated } from "./failures.js";
import {
  type CallOptions,
  type ClientOptions,
  callHeaders,
  checkedKeepalive,
  checkedRetry,
  checkedTimeout,
  type Retry,
  refuseOthers,
  serverUrl,
  tlsSecrets,
} from "./settings.js";
import { RuntimeService } from "./wire/kakeya/v1/runtime_pb.js";

/** The calls of the wire contract. */
export type Rpc = RpcClient<typeof RuntimeService>;

// A tokenizer file can be large; anything beyond this is no answer of ours.
const MAX_MESSAGE_BYTES = 256 * 2 ** 20;
// Between questions to a server that says that it restarts. Nobody is in a hurry, and there may be many of us.
const RESTART_PAUSE_MS = 1000;

/** Counts the tries of one call and pauses between them. All must be over after `timeoutMs`. */
export class Attempts {
  /** Whether one ended without telling what the server did. */
  afterABreak = false;
  #failed = 0;
  readonly #end: number | undefined;

  constructor(
    private readonly retry: Required<Retry>,
    timeoutMs: number | undefined,
    private readonly signals: readonly (AbortSignal | undefined)[],
  ) {
    this.#end = timeoutMs === undefined ? undefined : performance.now() + timeoutMs;
  }

  /** Whole milliseconds, undefined for no limit. Throws DeadlineExceeded when there are none left. */
  timeLeft(): number | undefined {
    if (this.#end === undefined) {
      return undefined;
    }
    const left = Math.ceil(this.#end - performance.now());
    if (left <= 0) {
      throw timeIsOver();
    }
    return left;
  }

  /** The work went on: the next failure is a first one. */
  progressed(): void {
    this.#failed = 0;
  }

  /**
   * Wait before the next try. Throws `error` when another try is useless or there is no time for it. A server
   * is waited for as long as it says that it restarts.
   *
   * `conflictPasses`: the session is busy only with work that is being stopped.
   */
  async pauseOrThrow(error: KakeyaError, conflictPasses = false): Promise<void> {
    const busy = error instanceof Conflict && !(error instanceof HistoryMismatch);
    if (!(error instanceof Unavailable || (busy && conflictPasses))) {
      throw error;
    }
    this.afterABreak ||= error instanceof Unavailable;
    const restarts = error instanceof Restarting;
    this.#failed = restarts ? 1 : this.#failed + 1;
    const delay = this.#delay(restarts ? RESTART_PAUSE_MS : this.retry.firstDelayMs);
    const tooLate = this.#end !== undefined && performance.now() + delay >= this.#end;
    if (this.#failed >= this.retry.attempts || tooLate) {
      throw error;
    }
    await pause(delay, this.signals);
  }

  #delay(first: number): number {
    const longest = Math.min(this.retry.longestDelayMs, first * 2 ** (this.#failed - 1));
    return longest * (0.5 + Math.random() / 2);
  }
}

/** What one call is told besides its request. */
export interface Trial extends CallOptions {
  readonly attempts?: Attempts;
  readonly conflictPasses?: boolean;
}

/** Connects at the first call, and again after a break. */
export class Connection {
  readonly timeoutMs: number | undefined;
  readonly headers: Record<string, string>;
  readonly #rpc: Rpc;
  readonly #line: Http2SessionManager;
  readonly #retry: Required<Retry>;
  readonly #closing = new AbortController();

  /** Throws ConfigError for a setting that cannot work, and TypeError for one that there is not. */
  constructor(options: ClientOptions) {
    const { address = "127.0.0.1:50051", tls = false, timeoutMs = 60_000, ...more } = options;
    const { apiKey, model, retry, keepalive: pace, ...others } = more;
    refuseOthers("Client", others);
    const keepalive = checkedKeepalive(pace);
    const baseUrl = serverUrl(address, tls !== false);
    this.timeoutMs = checkedTimeout(timeoutMs);
    this.headers = callHeaders(apiKey, model);
    this.#retry = checkedRetry(retry);
    const pings = { pingIntervalMs: keepalive.intervalMs, pingTimeoutMs: keepalive.timeoutMs };
    this.#line = new Http2SessionManager(baseUrl, pings, typeof tls === "object" ? tlsSecrets(tls) : {});
    const readMaxBytes = MAX_MESSAGE_BYTES;
    this.#rpc = createClient(
      RuntimeService,
      createGrpcTransport({ baseUrl, sessionManager: this.#line, readMaxBytes }),
    );
  }

  /** The calls. Throws Unavailable once closed. */
  get rpc(): Rpc {
    if (this.#closing.signal.aborted) {
      throw new Unavailable("this client is closed");
    }
    return this.#rpc;
  }

  /** The tries of one call. Every call with a signal begins here. */
  attempts(timeoutMs: number | undefined, signal?: AbortSignal): Attempts {
    expectMany(signal);
    return new Attempts(this.#retry, timeoutMs, [signal, this.#closing.signal]);
  }

  /**
   * The reply to a call, tried until it is answered or its time is over.
   *
   * Only for what may be repeated: reads, and calls with a request id. Throws the error the server meant, and
   * TypeError for an option that calls do not have.
   */
  async call<T>(send: (rpc: Rpc, options: RpcOptions) => Promise<T>, trial: Trial = {}): Promise<T> {
    const { signal, timeoutMs = this.timeoutMs, conflictPasses, attempts: begun, ...others } = trial;
    refuseOthers("this call", others);
    const attempts = begun ?? this.attempts(checkedTimeout(timeoutMs), signal);
    for (;;) {
      const rpc = this.rpc;
      const options = this.options(attempts, signal);
      try {
        return await send(rpc, options);
      } catch (error) {
        await attempts.pauseOrThrow(this.meaning(error, signal), conflictPasses);
      }
    }
  }

  /** What every call carries. Throws the signal's reason once it is aborted. */
  options(attempts: Attempts, signal: AbortSignal | undefined): RpcOptions {
    signal?.throwIfAborted();
    return { headers: this.headers, timeoutMs: attempts.timeLeft(), signal };
  }

  /** The error that a failed call stands for. Throws what was no failure of a call: an error of ours, an abort. */
  meaning(error: unknown, signal?: AbortSignal): KakeyaError {
    signal?.throwIfAborted();
    if (error instanceof KakeyaError) {
      throw error;
    }
    if (this.#closing.signal.aborted) {
      throw new Unavailable("this client was closed during the call");
    }
    return translated(error);
  }

  /** Close the connection; running calls end. May be called again. */
  close(): void {
    this.#closing.abort(new Unavailable("this client was closed during the call"));
    this.#line.abort();
  }
}

/** Many calls may wait for one signal, as agents do that end together. From eleven on Node warns of a leak. */
function expectMany(signal: AbortSignal | undefined): void {
  if (signal !== undefined) {
    setMaxListeners(0, signal);
  }
}

/** What `work` gives. Throws the reason of the first signal that aborts before. */
export async function unlessAborted<T>(work: Promise<T>, ...signals: (AbortSignal | undefined)[]): Promise<T> {
  let wake = () => {};
  const aborted = new Promise<void>((resolve) => {
    wake = resolve;
  });
  for (const signal of signals) {
    expectMany(signal);
    signal?.addEventListener("abort", wake);
  }
  try {
    await Promise.race([work, aborted]);
    for (const signal of signals) {
      signal?.throwIfAborted();
    }
    return await work;
  } finally {
    for (const signal of signals) {
      signal?.removeEventListener("abort", wake);
    }
  }
}

/** What `work` gives. After `timeoutMs` the signal that it is told aborts, with DeadlineExceeded as the reason. */
export async function within<T>(
  timeoutMs: number | undefined,
  signal: AbortSignal | undefined,
  work: (signal: AbortSignal | undefined) => Promise<T>,
): Promise<T> {
  if (timeoutMs === undefined) {
    return await work(signal);
  }
  const limit = new AbortController();
  const timer = setTimeout(() => limit.abort(timeIsOver()), timeoutMs);
  try {
    return await work(signal === undefined ? limit.signal : AbortSignal.any([signal, limit.signal]));
  } finally {
    clearTimeout(timer);
  }
}

function timeIsOver(): DeadlineExceeded {
  const over = new DeadlineExceeded("the time for this call is over");
  over.status = "DEADLINE_EXCEEDED";
  return over;
}

async function pause(delayMs: number, signals: readonly (AbortSignal | undefined)[]): Promise<void> {
  const timer = new AbortController();
  try {
    await unlessAborted(sleep(delayMs, undefined, { signal: timer.signal }), ...signals);
  } finally {
    timer.abort();
  }
}
