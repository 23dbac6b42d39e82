/** What a server reports, as plain values, and how they are read from the wire. */

import { RemoteError } from "./errors.js";
import {
  type Done,
  type GetServerInfoResponse,
  type GetSessionInfoResponse,
  StopReason as WireStopReason,
  type Token as WireToken,
  type TokenRange as WireTokenRange,
} from "./wire/kakeya/v1/runtime_pb.js";

/** Why a generate ended. */
export type StopReason = "MAX_TOKENS" | "EOS" | "CANCELLED" | "TRUNCATED";

/** A candidate token and its log-probability under the model's own distribution. */
export interface TokenLogprob {
  readonly id: number;
  readonly logprob: number;
}

/** One generated token. Log-probabilities are there if they were asked for, likeliest first. */
export interface Token {
  readonly id: number;
  readonly logprob?: number;
  readonly topLogprobs?: readonly TokenLogprob[];
}

/** Positions of a history, from 0: `start`, …, `end` - 1. */
export interface TokenRange {
  readonly start: number;
  readonly end: number;
}

/** How a generate ended. */
export interface GenerateResult {
  readonly stopReason: StopReason;
  readonly generatedTokenCount: number;
  readonly prefillDurationSeconds: number;
  readonly totalDurationSeconds: number;
  readonly cachedTokenCount: number;
  readonly acceptedDraftTokens: number;
  readonly proposedDraftTokens: number;
  /** Tokens of history that the model could no longer see. */
  readonly droppedTokenCount: number;
  /** What of its past the session saw beside its window, in order of time. */
  readonly recalled: readonly TokenRange[];
  readonly recallDurationSeconds: number;
}

/** What a session holds right now. */
export interface SessionInfo {
  readonly sessionId: string;
  /** `idle`, `generating` or `failed`; `host` or `disk` for a session that sleeps there. */
  readonly state: string;
  readonly clientLabel: string;
  readonly historyLength: number;
  readonly kvLiveBytes: number;
  readonly kvCapacityBytes: number;
  readonly droppedTokenCount: number;
  readonly cacheInvariantInv1Violations: number;
  readonly cacheInvariantInv2Violations: number;
  readonly idleSeconds: number;
  /** How many tokens that left the window it can see again at once. */
  readonly recallTokens: number;
  /** Those that it sees, in order of time. */
  readonly recalled: readonly TokenRange[];
  /** What its client wants it to see always. */
  readonly remembered: readonly TokenRange[];
  readonly recallDurationSeconds: number;
  readonly cacheInvariantInv4Violations: number;
}

/** What a server runs, and what one session costs there. */
export interface ServerInfo {
  readonly version: string;
  readonly modelId: string;
  readonly modelFingerprint: string;
  readonly layers: number;
  readonly kvHeads: number;
  readonly headDim: number;
  readonly vocabSize: number;
  readonly sink: number;
  readonly window: number;
  readonly capacity: number;
  readonly kvBytesPerSession: number;
  readonly features: readonly string[];
  readonly eosTokenIds: readonly number[];
  /** What guesses tokens ahead there, for speed alone. */
  readonly proposer: string;
  /** The most tokens that a session may ask to recall. */
  readonly recallTokens: number;
}

/** What a generate is called that was cancelled before anything came of it. */
export const NEVER_SENT: GenerateResult = {
  stopReason: "CANCELLED",
  generatedTokenCount: 0,
  prefillDurationSeconds: 0,
  totalDurationSeconds: 0,
  cachedTokenCount: 0,
  acceptedDraftTokens: 0,
  proposedDraftTokens: 0,
  droppedTokenCount: 0,
  recalled: [],
  recallDurationSeconds: 0,
};

const STOP_REASONS: Partial<Record<WireStopReason, StopReason>> = {
  [WireStopReason.MAX_TOKENS]: "MAX_TOKENS",
  [WireStopReason.EOS]: "EOS",
  [WireStopReason.CANCELLED]: "CANCELLED",
  [WireStopReason.TRUNCATED]: "TRUNCATED",
};

type Plain<M> = {
  -readonly [K in keyof M as K extends `$${string}` ? never : K]: M[K] extends bigint ? number : M[K];
};

/** The fields of a message as they are, 64-bit numbers as plain ones: the counts of a server are far below 2⁵³. */
function plain<M extends object>(message: M): Plain<M> {
  const fields = Object.entries(message).filter(([name]) => !name.startsWith("$"));
  return Object.fromEntries(
    fields.map(([name, value]) => [name, typeof value === "bigint" ? Number(value) : value]),
  ) as Plain<M>;
}

export function token(message: WireToken): Token {
  if (message.logprob === undefined) {
    return { id: message.id };
  }
  const topLogprobs = message.topLogprobs.map(({ id, logprob }) => ({ id, logprob }));
  return { id: message.id, logprob: message.logprob, topLogprobs };
}

export function tokenRanges(messages: readonly WireTokenRange[]): TokenRange[] {
  return messages.map((each) => ({ start: Number(each.start), end: Number(each.end) }));
}

export function sessionInfo(message: GetSessionInfoResponse): SessionInfo {
  const { recalled, remembered } = message;
  return { ...plain(message), recalled: tokenRanges(recalled), remembered: tokenRanges(remembered) };
}

export function serverInfo(message: GetServerInfoResponse): ServerInfo {
  return plain(message);
}

/** Throws RemoteError for a stop reason that this version does not know. */
export function generateResult(done: Done, droppedTokenCount: number): GenerateResult {
  const stopReason = STOP_REASONS[done.stopReason];
  if (stopReason === undefined) {
    throw new RemoteError(`the server stopped for a reason unknown here: number ${done.stopReason}`);
  }
  return { ...plain(done), stopReason, droppedTokenCount, recalled: tokenRanges(done.recalled) };
}

/** Two parts of one generate, the second of which continued where the first was broken off. */
export function joined(first: GenerateResult, later: GenerateResult): GenerateResult {
  return {
    ...later,
    generatedTokenCount: first.generatedTokenCount + later.generatedTokenCount,
    prefillDurationSeconds: first.prefillDurationSeconds,
    totalDurationSeconds: first.totalDurationSeconds + later.totalDurationSeconds,
    cachedTokenCount: first.cachedTokenCount,
    acceptedDraftTokens: first.acceptedDraftTokens + later.acceptedDraftTokens,
    proposedDraftTokens: first.proposedDraftTokens + later.proposedDraftTokens,
    recallDurationSeconds: first.recallDurationSeconds + later.recallDurationSeconds,
  };
}
