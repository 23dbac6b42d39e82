/** Requests of the wire, from what a caller gives. A value that does not fit its field is refused by name. */

import { randomBytes } from "node:crypto";
import { create, type DescField, type DescMessage, type MessageShape, ScalarType } from "@bufbuild/protobuf";
import { type ReflectMessage, reflect } from "@bufbuild/protobuf/reflect";
import { InvalidArgument } from "./errors.js";

export function newRequestId(): string {
  return randomBytes(16).toString("hex");
}

/** A message with these fields; undefined leaves one unset. Throws InvalidArgument naming the first bad one. */
export function build<Desc extends DescMessage>(
  desc: Desc,
  fields: Readonly<Record<string, unknown>>,
): MessageShape<Desc> {
  const message = create(desc);
  const reflected = reflect(desc, message);
  for (const [name, value] of Object.entries(fields)) {
    if (value !== undefined) {
      set(reflected, desc, name, value);
    }
  }
  return message;
}

function set(message: ReflectMessage, desc: DescMessage, name: string, value: unknown): void {
  const field = desc.field[name];
  if (field === undefined) {
    throw new TypeError(`${desc.name} has no field ${name}`);
  }
  try {
    fill(message, field, value);
  } catch (cause) {
    const reason = cause instanceof Error ? cause.message : String(cause);
    throw new InvalidArgument(`${name} cannot be ${shown(value)}: ${reason}`, { cause });
  }
}

function fill(message: ReflectMessage, field: DescField, value: unknown): void {
  if (field.fieldKind === "list") {
    const list = message.get(field);
    for (const item of value as Iterable<unknown>) {
      list.add(item);
    }
  } else if (field.fieldKind === "map") {
    const map = message.get(field);
    for (const [key, item] of Object.entries(value as object)) {
      map.set(Number(key), item);
    }
  } else {
    message.set(field, isLong(field) && typeof value === "number" ? BigInt(value) : value);
  }
}

function isLong(field: DescField): boolean {
  return field.fieldKind === "scalar" && field.scalar === ScalarType.UINT64;
}

function shown(value: unknown): string {
  if (typeof value === "bigint" || typeof value === "symbol") {
    return String(value);
  }
  return (JSON.stringify(value) ?? String(value)).slice(0, 60);
}
