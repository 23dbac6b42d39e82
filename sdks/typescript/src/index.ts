/**
 * The TypeScript SDK: sessions on a Kakeya server.
 *
 * Streams are async iterables, every call takes an `AbortSignal`, and `await using` closes what it opened. Errors
 * are the classes below {@link KakeyaError}, one for each row of the wire contract, with the gRPC status.
 *
 * This page is made by `make docs` from the comments in `sdks/typescript/src`; edit those.
 *
 * @packageDocumentation
 */

export { Client } from "./client.js";
export * from "./errors.js";
export { Session } from "./session.js";
export type {
  AppendOptions,
  CallOptions,
  ChatOptions,
  ClientOptions,
  GenerateOptions,
  ImportOptions,
  Keepalive,
  RecallOptions,
  Retry,
  SessionOptions,
  TLS,
} from "./settings.js";
export { Stream } from "./stream.js";
export type { Message, RenderOptions } from "./text/chat-template.js";
export { Detokenizer } from "./text/detokenizer.js";
export { type EncodeOptions, type SpecialOptions, Tokenizer, type TokenizerFiles } from "./text/tokenizer.js";
export type { GenerateResult, ServerInfo, SessionInfo, StopReason, Token, TokenLogprob, TokenRange } from "./values.js";
