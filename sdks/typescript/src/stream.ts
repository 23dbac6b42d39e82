/**
 * One generate as a stream: tokens in order, none twice, through broken connections.
 *
 * A broken stream leaves the server with exactly the tokens it had sent. Asking again with the same request id
 * replays them, so what got lost on the way is found, and a new request for the rest goes on from there: each
 * token's randomness depends only on the seed and its position, so the joint cannot be seen.
 */

import { type Attempts, type Connection, within } from "./connection.js";
import { RemoteError } from "./errors.js";
import { newRequestId } from "./requests.js";
import { type GenerateResult, generateResult, joined, NEVER_SENT, type Token, token } from "./values.js";
import type { Done, GenerateEvent, GenerateRequest, Token as WireToken } from "./wire/kakeya/v1/runtime_pb.js";

/** How far one call has come. */
interface Progress {
  seen: number;
  done: Done | undefined;
}

/**
 * The state of one generate, shared by its session and its reader.
 *
 * @internal
 */
export class Generation {
  /** Its reader asked for the end. */
  cancelled = false;
  /** The server has nothing more to do for it. */
  ended = false;
  /** How it ended, if the server said so. */
  result: GenerateResult | undefined;
  #begun: Attempts | undefined;
  #call: AbortController | undefined;
  #left = false;
  #received = 0;
  #dropped = 0;
  #earlier: GenerateResult | undefined;

  constructor(
    private readonly connection: Connection,
    readonly request: GenerateRequest,
    private readonly timeoutMs: number | undefined,
    readonly signal: AbortSignal | undefined,
  ) {}

  /** Whether its reader has left, which the server may not have noticed yet. */
  get isAbandoned(): boolean {
    return !this.ended && (this.cancelled || this.#left);
  }

  /** Stop the work. The reader then gets what the server had sent, and the result. */
  cancel(): void {
    this.cancelled = true;
    this.stop();
  }

  /** End the call that is running, if one is. */
  stop(): void {
    this.#call?.abort();
  }

  /**
   * What must be done before it, as part of its time. `work` gives up when its signal aborts.
   *
   * Throws DeadlineExceeded when that time is over.
   */
  async before<T>(work: (signal: AbortSignal | undefined) => Promise<T>): Promise<T> {
    return await within(this.#attempts.timeLeft(), this.signal, work);
  }

  /** Their time runs from the first use, when the reader asks for something. */
  get #attempts(): Attempts {
    this.#begun ??= this.connection.attempts(this.timeoutMs, this.signal);
    return this.#begun;
  }

  /**
   * The tokens, each once, over as many calls as it takes. `conflictPasses` as in `Attempts.pauseOrThrow`.
   *
   * Throws the error the server meant; a reader who leaves ends the call.
   */
  async *tokens(conflictPasses: boolean): AsyncGenerator<Token, void, undefined> {
    const attempts = this.#attempts;
    const stop = () => this.stop();
    this.signal?.addEventListener("abort", stop);
    try {
      while (this.result === undefined) {
        try {
          yield* this.#oneCall(attempts);
        } catch (error) {
          const meant = this.connection.meaning(error, this.signal);
          await attempts.pauseOrThrow(meant, conflictPasses || this.cancelled || attempts.afterABreak);
        }
      }
    } finally {
      this.signal?.removeEventListener("abort", stop);
      this.#left = true;
      this.stop();
    }
  }

  /** The tokens of one call that are new. Sets `result` when they were the last ones. */
  async *#oneCall(attempts: Attempts): AsyncGenerator<Token, void, undefined> {
    if (this.cancelled && this.#received === 0) {
      // Nothing came yet, and asking again could start work that is no longer wanted.
      this.result = this.#earlier ?? NEVER_SENT;
      return;
    }
    const { rpc } = this.connection;
    const options = this.connection.options(attempts, this.signal);
    const call = new AbortController();
    this.#call = call;
    const progress: Progress = { seen: 0, done: undefined };
    try {
      for await (const event of rpc.generate(this.request, { ...options, signal: call.signal })) {
        yield* this.#read(event, progress, attempts);
      }
    } catch (error) {
      this.signal?.throwIfAborted();
      if (progress.done === undefined && call.signal.aborted) {
        return; // by our own reader, who wants the result
      }
      if (progress.done === undefined) {
        throw error;
      }
    }
    if (progress.done === undefined) {
      throw new RemoteError("the stream ended without saying how");
    }
    this.#take(progress.done, attempts);
  }

  *#read(event: GenerateEvent, progress: Progress, attempts: Attempts): Generator<Token, void, undefined> {
    for (const message of tokensOf(event)) {
      progress.seen += 1;
      if (progress.seen > this.#received) {
        this.#received = progress.seen;
        attempts.progressed();
        yield token(message);
      }
    }
    if (event.event.case === "truncated") {
      this.#dropped = Number(event.event.value.droppedTokenCount);
    } else if (event.event.case === "done") {
      progress.done = event.event.value;
    }
  }

  /** The end of the generate, or of the part of it that a break cut off. */
  #take(done: Done, attempts: Attempts): void {
    const result = generateResult(done, this.#dropped);
    const total = this.#earlier === undefined ? result : joined(this.#earlier, result);
    const left = this.request.maxTokens - result.generatedTokenCount;
    const wasCut = result.stopReason === "CANCELLED" && attempts.afterABreak;
    if (!wasCut || this.cancelled || left <= 0) {
      this.result = total;
      this.ended = true;
      return;
    }
    this.#earlier = total;
    this.#received = 0;
    this.request.requestId = newRequestId();
    this.request.maxTokens = left;
    this.request.minTokens = Math.max(0, (this.request.minTokens ?? 0) - result.generatedTokenCount);
    attempts.afterABreak = false;
  }
}

function tokensOf(event: GenerateEvent): readonly WireToken[] {
  switch (event.event.case) {
    case "token":
      return [event.event.value];
    case "tokens":
      return event.event.value.tokens;
    default:
      return [];
  }
}

// A stream that nobody reads any more would keep the session busy.
const dropped = new FinalizationRegistry<Generation>((generation) => generation.cancel());

/**
 * What a generate or a chat says, as it is said. Iterate it once.
 *
 * Leaving it early (by `break`, `return`, `await using` or dropping it) cancels the work on the server.
 */
export class Stream<T> implements AsyncIterableIterator<T, void, undefined>, AsyncDisposable {
  readonly #items: AsyncGenerator<T, void, undefined>;
  readonly #generation: Generation;

  /** @internal */
  constructor(items: AsyncGenerator<T, void, undefined>, generation: Generation) {
    this.#items = items;
    this.#generation = generation;
    dropped.register(this, generation);
  }

  /** How it ended; undefined while it runs, after an error, and after leaving early. */
  get result(): GenerateResult | undefined {
    return this.#generation.result;
  }

  /** Stop the work on the server. The iteration then gives what was sent already, and ends. */
  cancel(): void {
    this.#generation.cancel();
  }

  /** The next piece. Throws the error the server meant, and the reason of a signal that aborted. */
  async next(): Promise<IteratorResult<T, void>> {
    return await this.#items.next();
  }

  /** Leave: cancel the work and give up what was not read. */
  async return(): Promise<IteratorResult<T, void>> {
    this.#generation.cancel();
    // A read under way ends first, now that its call does.
    return await this.#items.return();
  }

  [Symbol.asyncIterator](): this {
    return this;
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.return();
  }
}
