/**
 * Chat templates: the Jinja programs that models ship to write a conversation as text.
 *
 * They run in an interpreter of their own, which reaches nothing of this process.
 */

import { Template } from "@huggingface/jinja";
import { InvalidArgument } from "../errors.js";

const ROLES = ["system", "developer", "user", "assistant", "tool"];

/** One message of a conversation, with whatever else a template reads, such as `tool_calls`. */
export interface Message {
  readonly role: string;
  readonly content: string;
  readonly [name: string]: unknown;
}

/** How a conversation is written. */
export interface RenderOptions {
  /** End where the assistant's answer begins. Left out: true. */
  readonly addGenerationPrompt?: boolean;
  /** Functions that the model may call, as OpenAI describes them. */
  readonly tools?: readonly Readonly<Record<string, unknown>>[];
}

/** A template and the special tokens it may name, parsed at first use. No `source`, no template. */
export class ChatTemplate {
  #parsed: Template | undefined;

  constructor(
    private readonly source: string | undefined,
    private readonly specialTokens: Readonly<Record<string, string | undefined>>,
  ) {}

  get exists(): boolean {
    return this.source !== undefined;
  }

  /** Write the conversation. Bad messages, and whatever the template throws, become InvalidArgument. */
  render(messages: readonly Message[], options: RenderOptions = {}): string {
    const { addGenerationPrompt = true, tools = [] } = options;
    const conversation = checked(messages);
    const template = this.#template();
    const named = Object.entries(this.specialTokens).filter(([, token]) => token !== undefined);
    try {
      return template.render({
        messages: conversation,
        add_generation_prompt: addGenerationPrompt,
        tools: tools.length > 0 ? tools.map((tool) => ({ ...tool })) : null,
        documents: null,
        ...Object.fromEntries(named),
      });
    } catch (cause) {
      const reason = cause instanceof Error ? cause.message : String(cause);
      throw new InvalidArgument(`the chat template refused the messages: ${reason}`, { cause });
    }
  }

  #template(): Template {
    if (this.source === undefined) {
      throw new InvalidArgument("this model has no chat template; send it plain text instead");
    }
    try {
      this.#parsed ??= new Template(this.source);
    } catch (cause) {
      const reason = cause instanceof Error ? cause.message : String(cause);
      throw new InvalidArgument(`the model's chat template is not valid: ${reason}`, { cause });
    }
    return this.#parsed;
  }
}

/** The messages as templates expect them, or InvalidArgument naming the first bad one. */
function checked(messages: readonly Message[]): Message[] {
  if (!Array.isArray(messages)) {
    throw new InvalidArgument(`messages must be a list of messages, got ${typeof messages}`);
  }
  if (messages.length === 0) {
    throw new InvalidArgument("messages is empty; a conversation needs at least one message");
  }
  return messages.map(checkedMessage);
}

function checkedMessage(message: Message, index: number): Message {
  const where = `messages[${index}]`;
  if (typeof message !== "object" || message === null) {
    throw new InvalidArgument(`${where} must have a role and a content, got ${JSON.stringify(message)}`);
  }
  const { role, content } = message;
  if (!ROLES.includes(role)) {
    throw new InvalidArgument(`${where}.role must be one of ${ROLES.join(", ")}, got ${JSON.stringify(role)}`);
  }
  if (typeof content !== "string") {
    throw new InvalidArgument(`${where}.content must be a string, got ${JSON.stringify(content)}`);
  }
  return { ...message };
}
