/** The client: a connection to a server, and the sessions there. */

import { create } from "@bufbuild/protobuf";
import { Chat, fetchTokenizer } from "./chat.js";
import { Connection, unlessAborted } from "./connection.js";
import { build } from "./requests.js";
import { importFile, openSession, Session } from "./session.js";
import type { CallOptions, ClientOptions, ImportOptions, SessionOptions } from "./settings.js";
import type { Tokenizer } from "./text/tokenizer.js";
import { type ServerInfo, type SessionInfo, serverInfo, sessionInfo } from "./values.js";
import { CreateSessionRequestSchema } from "./wire/kakeya/v1/runtime_pb.js";

const PAGE = 1000;

/**
 * A connection to a Kakeya server, made at the first call.
 *
 * `await using` closes the connection at the end; sessions stay on the server until they are closed or expire.
 * Every call throws Unavailable when no try reaches the server, Unauthenticated for a missing or wrong key,
 * DeadlineExceeded when the time is over, and the reason of a signal that aborted.
 */
export class Client implements AsyncDisposable {
  readonly #connection: Connection;
  #tokenizer: Promise<Tokenizer> | undefined;

  /**
   * Throws ConfigError for a setting that cannot work, such as TLS files that cannot be read.
   *
   * Here and in every call, an option that there is not throws TypeError with its name.
   */
  constructor(options: ClientOptions = {}) {
    this.#connection = new Connection(options);
  }

  /**
   * A new empty session. Throws ResourceExhausted when the server has no room for one.
   *
   * `system` is for `session.chat`: the message is kept for ever, up to half of what the session holds, and
   * answers end where the model's template ends them, unless the other options say otherwise.
   */
  async createSession(options: SessionOptions = {}): Promise<Session> {
    const { label, system, ignoreEos = false, recallTokens, ...others } = options;
    const { eosTokenIds: ends, pinnedPrefixTokens: pinned, ...limits } = others;
    let eosTokenIds = ends && [...ends];
    let pinnedPrefixTokens = pinned;
    const chat = system === undefined ? undefined : await this.#newChat(limits, system, eosTokenIds);
    if (chat !== undefined) {
      eosTokenIds ??= ignoreEos ? undefined : chat.endTokenIds;
      pinnedPrefixTokens ??= chat.pinnedPrefixTokens(await this.serverInfo(limits));
    }
    const opening = build(CreateSessionRequestSchema, {
      clientLabel: label,
      eosTokenIds,
      ignoreEos,
      pinnedPrefixTokens,
      recallTokens,
    });
    const sessionId = await openSession(this.#connection, opening, limits);
    return new Session(this.#connection, (how) => this.#newChat(how), sessionId, opening, chat);
  }

  /** Attach to a session that exists. An unknown id throws SessionNotFound at its first use. */
  session(sessionId: string): Session {
    const opening = create(CreateSessionRequestSchema);
    return new Session(this.#connection, (how) => this.#newChat(how), sessionId, opening);
  }

  /**
   * A new session that continues an exported one, of a server with the same model.
   *
   * Throws StateMismatch for a file of another model or geometry, and for a damaged one.
   */
  async importSession(file: Uint8Array, options: ImportOptions = {}): Promise<Session> {
    return this.session(await importFile(this.#connection, file, options));
  }

  /** The caller's own sessions, oldest first. */
  async listSessions(options: CallOptions = {}): Promise<SessionInfo[]> {
    const sessions: SessionInfo[] = [];
    let pageToken = "";
    do {
      const request = { pageSize: PAGE, pageToken };
      const page = await this.#connection.call((rpc, how) => rpc.listSessions(request, how), options);
      sessions.push(...page.sessions.map(sessionInfo));
      pageToken = page.nextPageToken;
    } while (pageToken !== "");
    return sessions;
  }

  /** What the server runs. */
  async serverInfo(options: CallOptions = {}): Promise<ServerInfo> {
    return serverInfo(await this.#connection.call((rpc, how) => rpc.getServerInfo({}, how), options));
  }

  /**
   * The model's tokenizer, fetched from the server once, for all who ask meanwhile.
   *
   * The client's own time limit holds. An aborted signal ends the wait, and not the fetch.
   */
  async tokenizer(options: Pick<CallOptions, "signal"> = {}): Promise<Tokenizer> {
    options.signal?.throwIfAborted();
    if (this.#tokenizer === undefined) {
      const fetching = fetchTokenizer(this.#connection);
      // What failed is tried again by the next who asks.
      fetching.catch(() => {
        this.#tokenizer = undefined;
      });
      this.#tokenizer = fetching;
    }
    return await unlessAborted(this.#tokenizer, options.signal);
  }

  /** Close the connection; running calls end. May be called again. */
  close(): void {
    this.#connection.close();
  }

  async [Symbol.asyncDispose](): Promise<void> {
    this.close();
  }

  async #newChat(limits: CallOptions, system?: string, eosTokenIds?: readonly number[]): Promise<Chat> {
    const eos = eosTokenIds ?? (await this.serverInfo(limits)).eosTokenIds;
    return Chat.begin(await this.tokenizer(limits), eos, system);
  }
}
