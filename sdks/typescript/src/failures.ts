/** gRPC statuses as errors of our tree: the server's table, read backwards. */

import { Code, ConnectError } from "@connectrpc/connect";
import type { KakeyaError } from "./errors.js";
import * as errors from "./errors.js";

type Kind = new (message: string, options?: ErrorOptions) => KakeyaError;

const BY_STATUS: Partial<Record<Code, Kind>> = {
  [Code.NotFound]: errors.SessionNotFound,
  [Code.InvalidArgument]: errors.InvalidArgument,
  [Code.OutOfRange]: errors.InvalidArgument,
  [Code.Aborted]: errors.Conflict,
  [Code.FailedPrecondition]: errors.InvariantViolation,
  [Code.ResourceExhausted]: errors.ResourceExhausted,
  [Code.Unauthenticated]: errors.Unauthenticated,
  [Code.Unavailable]: errors.Unavailable,
  [Code.DeadlineExceeded]: errors.DeadlineExceeded,
};

// Where one status stands for several errors, the server names the one it means.
const BY_NAME: Record<string, Kind> = {
  Restarting: errors.Restarting,
  SessionBusy: errors.SessionBusy,
  HistoryMismatch: errors.HistoryMismatch,
  StepFailed: errors.StepFailed,
  StateMismatch: errors.StateMismatch,
  StateDamaged: errors.StateDamaged,
};
const ERROR_NAME_KEY = "kakeya-error";

// What Connect calls a line that broke before the server's own status came.
const BROKEN_LINE = new Set([
  Code.Aborted,
  Code.Canceled,
  Code.DataLoss,
  Code.Internal,
  Code.InvalidArgument,
  Code.ResourceExhausted,
  Code.Unavailable,
]);

/** The error that the server meant, with its status; `Unavailable` for a connection that broke. */
export function translated(error: unknown): KakeyaError {
  const cause = ConnectError.from(error);
  const code = isStatusOfServer(cause) || !BROKEN_LINE.has(cause.code) ? cause.code : Code.Unavailable;
  const status = statusName(code);
  const message = cause.rawMessage || status;
  const kind = BY_NAME[cause.metadata.get(ERROR_NAME_KEY) ?? ""] ?? BY_STATUS[code];
  const translation =
    kind === undefined ? new errors.RemoteError(`${status}: ${message}`, { cause }) : new kind(message, { cause });
  translation.status = status;
  return translation;
}

function isStatusOfServer(error: ConnectError): boolean {
  return error.metadata.has("grpc-status");
}

/** gRPC's own spelling: `NotFound` is `NOT_FOUND`. */
function statusName(code: Code): string {
  if (code === Code.Canceled) {
    return "CANCELLED";
  }
  return (Code[code] ?? String(code)).replace(/(?<=[a-z])(?=[A-Z])/g, "_").toUpperCase();
}
