/** A session on a server: append, generate, chat. */

import { create } from "@bufbuild/protobuf";
import type { Chat } from "./chat.js";
import type { Connection } from "./connection.js";
import { SessionNotFound } from "./errors.js";
import { build, newRequestId } from "./requests.js";
import {
  type AppendOptions,
  type CallOptions,
  type ChatOptions,
  checkedTimeout,
  type GenerateOptions,
  type ImportOptions,
  type RecallOptions,
  refuseOthers,
} from "./settings.js";
import { Generation, Stream } from "./stream.js";
import {
  type GenerateResult,
  type SessionInfo,
  sessionInfo,
  type Token,
  type TokenRange,
  tokenRanges,
} from "./values.js";
import {
  AppendTokensRequestSchema,
  type CreateSessionRequest,
  CreateSessionRequestSchema,
  GenerateRequestSchema,
  ImportSessionRequestSchema,
  RecallTokensRequestSchema,
  TokenRangeSchema,
} from "./wire/kakeya/v1/runtime_pb.js";

const PART_BYTES = 2 ** 20;

// Options of a generate that are fields of the request, by the same names.
const SAMPLING: ReadonlySet<string> = new Set<keyof GenerateOptions>([
  "seed",
  "temperature",
  "topP",
  "topK",
  "minP",
  "repetitionPenalty",
  "presencePenalty",
  "frequencyPenalty",
  "logitBias",
  "logprobs",
  "minTokens",
  "ignoreEos",
  "stopTokenIds",
]);

/**
 * How a session begins a conversation.
 *
 * @internal
 */
export type OpenChat = (options: CallOptions) => Promise<Chat>;

/**
 * A new session on the server; its id.
 *
 * @internal
 */
export async function openSession(
  connection: Connection,
  opening: CreateSessionRequest,
  options: CallOptions = {},
): Promise<string> {
  const request = create(CreateSessionRequestSchema, { ...opening, requestId: newRequestId() });
  const reply = await connection.call((rpc, how) => rpc.createSession(request, how), options);
  return reply.sessionId;
}

/**
 * A new session on the server that continues an exported one; its id.
 *
 * @internal
 */
export async function importFile(connection: Connection, file: Uint8Array, options: ImportOptions): Promise<string> {
  const { label, ...limits } = options;
  const requestId = newRequestId();
  async function* parts() {
    yield build(ImportSessionRequestSchema, { data: file.subarray(0, PART_BYTES), clientLabel: label, requestId });
    for (let start = PART_BYTES; start < file.length; start += PART_BYTES) {
      yield create(ImportSessionRequestSchema, { data: file.subarray(start, start + PART_BYTES) });
    }
  }
  const reply = await connection.call((rpc, how) => rpc.importSession(parts(), how), limits);
  return reply.sessionId;
}

async function joinedParts(parts: AsyncIterable<{ data: Uint8Array }>): Promise<Uint8Array> {
  const pieces: Uint8Array[] = [];
  for await (const part of parts) {
    pieces.push(part.data);
  }
  return Buffer.concat(pieces);
}

/**
 * A conversation that the server holds. Made by `client.createSession` and `client.session`.
 *
 * `await using` closes it at the end.
 */
export class Session implements AsyncDisposable {
  readonly #connection: Connection;
  readonly #openChat: OpenChat;
  readonly #opening: CreateSessionRequest;
  #sessionId: string;
  #chat: Chat | undefined;
  #latest: Generation | undefined;

  /** @internal */
  constructor(
    connection: Connection,
    openChat: OpenChat,
    sessionId: string,
    opening: CreateSessionRequest,
    chat?: Chat,
  ) {
    this.#connection = connection;
    this.#openChat = openChat;
    this.#sessionId = sessionId;
    this.#opening = opening;
    this.#chat = chat;
  }

  /** Names the session on the server; `client.session(sessionId)` attaches to it again. */
  get sessionId(): string {
    return this.#sessionId;
  }

  /** How the last generate or chat ended; undefined while it runs, after an error and after leaving early. */
  get lastResult(): GenerateResult | undefined {
    return this.#latest?.result;
  }

  /**
   * Add tokens to the history; returns its length. They are computed by the next generate.
   *
   * Throws InvalidArgument for an id outside the vocabulary, SessionBusy during a generate, and HistoryMismatch
   * unless the history has `expectedHistoryLength` tokens; nothing is changed then.
   */
  async append(tokenIds: Iterable<number>, options: AppendOptions = {}): Promise<number> {
    const { expectedHistoryLength, ...limits } = options;
    const request = build(AppendTokensRequestSchema, {
      sessionId: this.#sessionId,
      tokenIds,
      expectedHistoryLength,
      requestId: newRequestId(),
    });
    const conflictPasses = this.#isStopping();
    const reply = await this.#connection.call((rpc, how) => rpc.appendTokens(request, how), {
      ...limits,
      conflictPasses,
    });
    this.#settled(conflictPasses);
    return Number(reply.historyLength);
  }

  /**
   * Generate up to `maxTokens` tokens after the history; iterate the stream to get them.
   *
   * The request goes out with the first token asked for. Iterating throws InvalidArgument for a bad option or an
   * empty history, SessionBusy while another generate runs, and ResourceExhausted when the server has no room.
   */
  generate(maxTokens: number, options: GenerateOptions = {}): Stream<Token> {
    const generation = this.#generation(maxTokens, options);
    return new Stream(this.#tokens(generation), generation);
  }

  /**
   * Say `text` and stream the answer as text; the conversation is this object's own.
   *
   * The first chat on a session begins a conversation, after whatever the history holds. Where the model's
   * template rewrites earlier turns, the conversation moves to a new session (`sessionId` changes) and the old
   * one is closed. Throws InvalidArgument for a model without a chat template.
   */
  chat(text: string, options: ChatOptions = {}): Stream<string> {
    const { maxTokens = 512, ...others } = options;
    const generation = this.#generation(maxTokens, others);
    return new Stream(this.#answer(text, generation), generation);
  }

  /** What the session holds. Asking does not refresh its idle clock. */
  async info(options: CallOptions = {}): Promise<SessionInfo> {
    const request = { sessionId: this.#sessionId };
    return sessionInfo(await this.#connection.call((rpc, how) => rpc.getSessionInfo(request, how), options));
  }

  /**
   * Let the next generate see these ranges of the history again, instead of what would be searched for.
   *
   * With `remember`, they take the place of those remembered so far: every later generate that does not see them
   * brings them back. Returns what the next one is known to bring back. Throws InvalidArgument for ranges outside the
   * history, in sight, that overlap or that are longer than the session's `recallTokens`, and for a session
   * without; nothing is changed then.
   */
  async recall(ranges: Iterable<TokenRange>, options: RecallOptions = {}): Promise<TokenRange[]> {
    const { remember, ...limits } = options;
    const request = build(RecallTokensRequestSchema, {
      sessionId: this.#sessionId,
      remember,
      requestId: newRequestId(),
    });
    request.ranges = Array.from(ranges, ({ start, end }) => build(TokenRangeSchema, { start, end }));
    const conflictPasses = this.#isStopping();
    const reply = await this.#connection.call((rpc, how) => rpc.recallTokens(request, how), {
      ...limits,
      conflictPasses,
    });
    this.#settled(conflictPasses);
    return tokenRanges(reply.ranges);
  }

  /** The session's whole state as a file, for `client.importSession` of any server with the same model. */
  async export(options: CallOptions = {}): Promise<Uint8Array> {
    const request = { sessionId: this.#sessionId };
    const conflictPasses = this.#isStopping();
    return await this.#connection.call((rpc, how) => joinedParts(rpc.exportSession(request, how)), {
      ...options,
      conflictPasses,
    });
  }

  /** A new session with the same history and conversation, independent from here on. */
  async fork(options: CallOptions = {}): Promise<Session> {
    const request = { sessionId: this.#sessionId, requestId: newRequestId() };
    const conflictPasses = this.#isStopping();
    const reply = await this.#connection.call((rpc, how) => rpc.forkSession(request, how), {
      ...options,
      conflictPasses,
    });
    this.#settled(conflictPasses);
    return new Session(this.#connection, this.#openChat, reply.sessionId, this.#opening, this.#chat?.fork());
  }

  /**
   * Free the session, cancelling what runs; its final history length.
   *
   * Undefined when the reply was lost on the way and the session is gone all the same.
   */
  async close(options: CallOptions = {}): Promise<number | undefined> {
    const { signal, timeoutMs = this.#connection.timeoutMs } = options;
    const attempts = this.#connection.attempts(checkedTimeout(timeoutMs), signal);
    const request = { sessionId: this.#sessionId };
    try {
      const reply = await this.#connection.call((rpc, how) => rpc.closeSession(request, how), {
        ...options,
        attempts,
      });
      return Number(reply.finalHistoryLength);
    } catch (error) {
      if (error instanceof SessionNotFound && attempts.afterABreak) {
        return undefined;
      }
      throw error;
    }
  }

  async [Symbol.asyncDispose](): Promise<void> {
    try {
      await this.close();
    } catch (error) {
      // It was closed or it expired in the meantime, which is what was wanted.
      if (!(error instanceof SessionNotFound)) {
        throw error;
      }
    }
  }

  #generation(maxTokens: number, options: GenerateOptions): Generation {
    const { signal, timeoutMs, ...sampling } = options;
    const others = Object.entries(sampling).filter(([name]) => !SAMPLING.has(name));
    refuseOthers("generate", Object.fromEntries(others));
    const request = build(GenerateRequestSchema, {
      ...sampling,
      maxTokens,
      requestId: newRequestId(),
      groupTokens: true,
    });
    return new Generation(this.#connection, request, checkedTimeout(timeoutMs), signal);
  }

  async *#tokens(generation: Generation): AsyncGenerator<Token, void, undefined> {
    const conflictPasses = this.#isStopping();
    this.#latest = generation;
    generation.request.sessionId = this.#sessionId;
    yield* generation.tokens(conflictPasses);
  }

  async *#answer(text: string, generation: Generation): AsyncGenerator<string, void, undefined> {
    const chat = await generation.before((signal) => this.#asked(text, signal));
    yield* chat.answer(text, this.#tokens(generation));
  }

  /** The conversation, once the message is part of the history. */
  async #asked(text: string, signal: AbortSignal | undefined): Promise<Chat> {
    this.#chat ??= await this.#openChat({ signal });
    const turn = this.#chat.nextTurn(text);
    if (turn.restarts) {
      await this.#move(signal);
    }
    await this.append(turn.tokenIds, { signal });
    return this.#chat;
  }

  /** To a new empty session with the same settings. */
  async #move(signal: AbortSignal | undefined): Promise<void> {
    const successor = await openSession(this.#connection, this.#opening, { signal });
    await this.close({ signal });
    this.#sessionId = successor;
  }

  /** Whether the server may be busy with a generate whose reader has left; makes sure that it stops. */
  #isStopping(): boolean {
    if (!this.#latest?.isAbandoned) {
      return false;
    }
    this.#latest.stop();
    return true;
  }

  #settled(wasStopping: boolean): void {
    if (wasStopping && this.#latest !== undefined) {
      this.#latest.ended = true;
    }
  }
}
