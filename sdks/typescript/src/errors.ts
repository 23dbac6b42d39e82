/**
 * One error tree, the same names as in Python:
 *
 *     KakeyaError
 *     ├── ConfigError            a setting that cannot work, named with what would be right
 *     ├── ModelError             something is wrong with the model's tokenizer
 *     │   ├── CorruptCheckpoint  its files contradict themselves
 *     │   └── UnsupportedModel   its vocabulary is spelled in a way that cannot be decoded here
 *     ├── InvalidArgument        a bad request: token id, sampling value, empty history
 *     ├── SessionNotFound        unknown, closed, expired or someone else's session
 *     ├── Conflict               the session is not as the call needs it; nothing was changed
 *     │   ├── SessionBusy        the session is generating already
 *     │   └── HistoryMismatch    expectedHistoryLength differs from the real one
 *     ├── ComeBackLater          it may work later
 *     │   ├── ResourceExhausted  no slab free, queue full, over quota
 *     │   └── Unavailable        draining, shut down, still loading or out of reach
 *     │       └── Restarting     the server says that it is loading, or that it ends and takes no new work
 *     ├── InvariantViolation     the session's bookkeeping broke; the session is failed
 *     ├── StateMismatch          an exported session of another model, geometry or format
 *     │   └── StateDamaged       one that was cut or changed
 *     ├── StepFailed             computing the request's step raised
 *     ├── Unauthenticated        missing or wrong API key
 *     ├── DeadlineExceeded       no answer in the time the caller allowed
 *     └── RemoteError            a server answered with something none of the others stands for
 */

/** Base of every error that this package throws on purpose. */
export class KakeyaError extends Error {
  /** The gRPC status that it came with, such as `NOT_FOUND`; undefined for an error of this process. */
  status: string | undefined;

  /** @internal */
  constructor(message: string, options?: ErrorOptions) {
    super(message, options);
    this.name = new.target.name;
  }
}

/** A setting is out of range or contradicts another. */
export class ConfigError extends KakeyaError {}

/** Something is wrong with a model's tokenizer. */
export class ModelError extends KakeyaError {}

/** The tokenizer's files contradict themselves. */
export class CorruptCheckpoint extends ModelError {}

/** The vocabulary is spelled in a way that cannot be decoded here. */
export class UnsupportedModel extends ModelError {}

/** A request holds a value that cannot be honoured. */
export class InvalidArgument extends KakeyaError {}

/** The session is unknown, closed, expired or belongs to someone else. */
export class SessionNotFound extends KakeyaError {}

/** The session is not in the state the call needs. Nothing was changed. */
export class Conflict extends KakeyaError {}

/** The session is generating; one generate at a time. */
export class SessionBusy extends Conflict {}

/** The caller's idea of the history length is out of date. */
export class HistoryMismatch extends Conflict {}

/** It may work later. */
export class ComeBackLater extends KakeyaError {}

/** No slab, queue place or quota is left. Nothing was changed. */
export class ResourceExhausted extends ComeBackLater {}

/** The server is draining, shut down, dead, still loading or out of reach. */
export class Unavailable extends ComeBackLater {}

/** The server says that it is loading, or that it ends and takes no new work. Clients wait for it. */
export class Restarting extends Unavailable {}

/** A session's bookkeeping contradicts its storage; the session is failed and freed. */
export class InvariantViolation extends KakeyaError {}

/** An exported session does not fit this model, geometry or format. */
export class StateMismatch extends KakeyaError {}

/** An exported session is not what was exported. */
export class StateDamaged extends StateMismatch {}

/** The engine step that carried this request failed; others are unharmed. */
export class StepFailed extends KakeyaError {}

/** The API key is missing or wrong. */
export class Unauthenticated extends KakeyaError {}

/** The caller's time limit passed before the answer came. */
export class DeadlineExceeded extends KakeyaError {}

/** A server failed inside, or answered with something that is not in the contract. */
export class RemoteError extends KakeyaError {}
