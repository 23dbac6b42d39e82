/** What a client can be told, with what holds where nothing is said. Bad values are refused by name. */

import { readFileSync } from "node:fs";
import { ConfigError } from "./errors.js";

// Metadata by which a caller names the model that it means.
const MODEL_KEY = "kakeya-model";

/**
 * How often and how patiently a call is tried when the server cannot be reached or a reply is lost.
 *
 * The pause doubles from `firstDelayMs` up to `longestDelayMs`; each is cut at random by up to a half. A server that
 * says that it loads or drains is asked again each second, and that counts as no failure. Every call that changes
 * something carries a request id, so nothing is done twice. One attempt: no retry.
 */
export interface Retry {
  /** How often a call is tried. Left out: 9. */
  readonly attempts?: number;
  /** The pause after the first failure. Left out: 100. */
  readonly firstDelayMs?: number;
  /** The longest pause. Left out: 5000. */
  readonly longestDelayMs?: number;
}

/** A connection quiet for `intervalMs` asks the server for a sign of life, and waits `timeoutMs` for it. */
export interface Keepalive {
  /** Left out: 30,000. */
  readonly intervalMs?: number;
  /** Left out: 10,000. */
  readonly timeoutMs?: number;
}

/** Encrypt the connection. The files hold PEM. */
export interface TLS {
  /** Checks the server. Left out, the system's authorities do. */
  readonly caFile?: string;
  /** Proves who the client is, together with `keyFile`: both or neither. */
  readonly certFile?: string;
  readonly keyFile?: string;
}

/** What `new Client` takes. */
export interface ClientOptions {
  /** The server's host and port. Left out: `127.0.0.1:50051`. */
  readonly address?: string;
  /** A key of the server's, if it wants one. */
  readonly apiKey?: string;
  /**
   * For a cluster that serves several: the model of new sessions, of the tokenizer and of the server's description.
   * Left out, it is the cluster's first. A server that is no cluster takes no notice.
   */
  readonly model?: string;
  /** Encrypt the connection; `true` trusts the system's authorities. Left out: no encryption. */
  readonly tls?: TLS | boolean;
  /** Limits each call but generate and chat, retries included. `null`: no limit. Left out: 60,000. */
  readonly timeoutMs?: number | null;
  readonly retry?: Retry;
  readonly keepalive?: Keepalive;
}

/** What every call takes. */
export interface CallOptions {
  /** Give up when it aborts: the call then throws the signal's reason. */
  readonly signal?: AbortSignal;
  /** Give up after this many milliseconds, over all retries. `null`: never. Left out: the client's own limit. */
  readonly timeoutMs?: number | null;
}

/** What `client.createSession` takes. */
export interface SessionOptions extends CallOptions {
  /** A name of your own, shown in listings and logs. */
  readonly label?: string;
  /** For `session.chat`: the message is kept for ever, up to half of what the session holds. */
  readonly system?: string;
  /** Tokens that end a generate. Left out: the model's own. */
  readonly eosTokenIds?: Iterable<number>;
  /** Nothing but the length ends a generate. */
  readonly ignoreEos?: boolean;
  /** Keep this many first tokens for ever. */
  readonly pinnedPrefixTokens?: number;
  /** Each turn sees up to so many tokens again that have left the window: those that share words with what is new. */
  readonly recallTokens?: number;
}

/** What `client.importSession` takes. */
export interface ImportOptions extends CallOptions {
  /** A name of your own, shown in listings and logs. */
  readonly label?: string;
}

/** What `session.recall` takes. */
export interface RecallOptions extends CallOptions {
  /** Every later generate that does not see the ranges brings them back. Left out: only the next one does. */
  readonly remember?: boolean;
}

/** What `session.append` takes. */
export interface AppendOptions extends CallOptions {
  /** Refused with `HistoryMismatch`, changing nothing, unless the history has exactly this many tokens. */
  readonly expectedHistoryLength?: number;
}

/** What a generate may be asked, besides its length. What is left out is the server's default: greedy. */
export interface GenerateOptions {
  /** Decides the randomness, together with each token's position. */
  readonly seed?: number | bigint;
  /** 0 is greedy. */
  readonly temperature?: number;
  /** Keep the likeliest tokens that together reach this probability. */
  readonly topP?: number;
  /** Keep this many likeliest tokens; 0 keeps all. */
  readonly topK?: number;
  /** Drop tokens less likely than this share of the likeliest one. */
  readonly minP?: number;
  /** Divide the logits of recent tokens by this. */
  readonly repetitionPenalty?: number;
  /** Subtract this from the logits of tokens that occurred recently. */
  readonly presencePenalty?: number;
  /** Subtract this from the logits of recent tokens, once for each occurrence. */
  readonly frequencyPenalty?: number;
  /** Add these to the logits of these tokens. */
  readonly logitBias?: Readonly<Record<number, number>>;
  /** Report each token's log-probability and this many of the likeliest tokens, 0 to 20. */
  readonly logprobs?: number;
  /** Choose no token that would end the generate before this many. */
  readonly minTokens?: number;
  /** Let the session's EOS tokens be chosen like any other, and end nothing. */
  readonly ignoreEos?: boolean;
  /** End with these tokens as well; the one that ends it is sent and kept. */
  readonly stopTokenIds?: readonly number[];
  /** Stop the work when it aborts: the iteration then throws the signal's reason. */
  readonly signal?: AbortSignal;
  /** Give up after this many milliseconds, over all retries and what a chat needs first. Left out: never. */
  readonly timeoutMs?: number;
}

/** What `session.chat` takes. */
export interface ChatOptions extends GenerateOptions {
  /** The longest answer. Left out: 512. */
  readonly maxTokens?: number;
}

/** Throws TypeError for what is left of the options of `what`: a misspelt one must not change nothing in silence. */
export function refuseOthers(what: string, others: object): void {
  const [name] = Object.keys(others);
  if (name !== undefined) {
    throw new TypeError(`${what} has no option ${name}`);
  }
}

/** Retries with every value there. */
export function checkedRetry(retry: Retry = {}): Required<Retry> {
  const { attempts = 9, firstDelayMs = 100, longestDelayMs = 5000, ...others } = retry;
  refuseOthers("retry", others);
  if (!Number.isInteger(attempts) || attempts < 1) {
    throw new ConfigError(`retry.attempts must be at least 1, got ${attempts}`);
  }
  if (!(0 < firstDelayMs && firstDelayMs <= longestDelayMs)) {
    throw new ConfigError(`retry needs 0 < firstDelayMs <= longestDelayMs, got ${firstDelayMs} and ${longestDelayMs}`);
  }
  return { attempts, firstDelayMs, longestDelayMs };
}

/** A keepalive with every value there. */
export function checkedKeepalive(keepalive: Keepalive = {}): Required<Keepalive> {
  const { intervalMs = 30_000, timeoutMs = 10_000, ...others } = keepalive;
  refuseOthers("keepalive", others);
  if (!(intervalMs > 0 && timeoutMs > 0)) {
    throw new ConfigError(`keepalive times must be above 0, got ${intervalMs} and ${timeoutMs}`);
  }
  return { intervalMs, timeoutMs };
}

/** A time limit in milliseconds; `null` and `undefined` for none. */
export function checkedTimeout(timeoutMs: number | null | undefined): number | undefined {
  if (timeoutMs === null || timeoutMs === undefined) {
    return undefined;
  }
  if (!(timeoutMs >= 0)) {
    throw new ConfigError(`timeoutMs must not be negative, got ${timeoutMs}`);
  }
  return timeoutMs;
}

/**
 * What Node's TLS needs. Reads the files.
 *
 * @internal
 */
export function tlsSecrets(tls: TLS): { ca?: Buffer; cert?: Buffer; key?: Buffer } {
  const { caFile, certFile, keyFile, ...others } = tls;
  refuseOthers("tls", others);
  if ((certFile === undefined) !== (keyFile === undefined)) {
    throw new ConfigError("tls needs certFile and keyFile together, or neither");
  }
  return {
    ...(caFile === undefined ? {} : { ca: content(caFile) }),
    ...(certFile === undefined ? {} : { cert: content(certFile) }),
    ...(keyFile === undefined ? {} : { key: content(keyFile) }),
  };
}

function content(path: string): Buffer {
  try {
    return readFileSync(path);
  } catch (cause) {
    throw new ConfigError(`cannot read the TLS file ${path}: ${(cause as Error).message}`, { cause });
  }
}

/** The URL of a server; `secure` for one with TLS. */
export function serverUrl(address: string, secure: boolean): string {
  if (!/^(\[[\da-fA-F:.]+\]|[^\s:/@?#]+):\d{1,5}$/.test(address)) {
    throw new ConfigError(`address must be a host and a port, such as 127.0.0.1:50051, got ${address}`);
  }
  return `${secure ? "https" : "http"}://${address}`;
}

/** The headers of every call. */
export function callHeaders(apiKey: string | undefined, model: string | undefined): Record<string, string> {
  if (apiKey !== undefined && !/^[\x21-\x7e]+$/.test(apiKey)) {
    throw new ConfigError("apiKey must be printable ASCII without spaces");
  }
  if (model !== undefined && !/^[\x20-\x7e]+$/.test(model)) {
    throw new ConfigError(`model must be printable ASCII, got ${JSON.stringify(model)}`);
  }
  return {
    ...(apiKey === undefined ? {} : { authorization: `Bearer ${apiKey}` }),
    ...(model === undefined ? {} : { [MODEL_KEY]: model }),
  };
}
