// Writes tests/unit/constraints/zod_schemas.json: the schemas that `z.toJSONSchema` has for zod's types,
// each once, without `$schema`.
import { writeFileSync } from "node:fs";
import { z } from "zod";

const Category = z.object({
  name: z.string(),
  get children() {
    return z.array(Category);
  },
});
const Dog = z.object({ kind: z.literal("dog"), age: z.int().min(0).max(30) });
const Cat = z.object({ kind: z.literal("cat"), lives: z.number().optional() });
const Named = z.object({ name: z.string().meta({ id: "Name", title: "A name" }) });
const shapes = {
  string: z.string(),
  string_bounds: z.string().min(1).max(8),
  string_length: z.string().length(4),
  regex: z.string().regex(/^[A-Z]{2}-\d+$/),
  lowercase: z.string().lowercase(),
  uppercase: z.string().uppercase(),
  trim: z.string().trim().min(1),
  email: z.email(),
  email_html5: z.email({ pattern: z.regexes.html5Email }),
  email_rfc5322: z.email({ pattern: z.regexes.rfc5322Email }),
  email_unicode: z.email({ pattern: z.regexes.unicodeEmail }),
  uuid: z.uuid(),
  uuid_v4: z.uuid({ version: "v4" }),
  uuid_v7: z.uuidv7(),
  guid: z.guid(),
  url: z.url(),
  url_https: z.url({ protocol: /^https?$/, hostname: z.regexes.domain }),
  http_url: z.httpUrl(),
  hostname: z.hostname(),
  emoji: z.emoji(),
  nanoid: z.nanoid(),
  cuid: z.cuid(),
  cuid2: z.cuid2(),
  ulid: z.ulid(),
  xid: z.xid(),
  ksuid: z.ksuid(),
  ipv4: z.ipv4(),
  ipv6: z.ipv6(),
  cidrv4: z.cidrv4(),
  cidrv6: z.cidrv6(),
  mac: z.mac(),
  base64: z.base64(),
  base64url: z.base64url(),
  e164: z.e164(),
  jwt: z.jwt(),
  jwt_alg: z.jwt({ alg: "HS256" }),
  hash: z.hash("sha256"),
  hex: z.hex(),
  iso_datetime: z.iso.datetime(),
  iso_datetime_offset: z.iso.datetime({ offset: true }),
  iso_datetime_local: z.iso.datetime({ local: true }),
  iso_datetime_precision: z.iso.datetime({ precision: 3 }),
  iso_date: z.iso.date(),
  iso_time: z.iso.time(),
  iso_time_minutes: z.iso.time({ precision: -1 }),
  iso_duration: z.iso.duration(),
  number: z.number(),
  number_bounds: z.number().gt(0).lte(10),
  number_multiple: z.number().multipleOf(0.5).min(0).max(100),
  int: z.int(),
  int32: z.int32(),
  uint32: z.uint32(),
  float32: z.float32(),
  float64: z.float64(),
  int_positive: z.int().positive(),
  int_nonnegative: z.int().nonnegative().max(9),
  boolean: z.boolean(),
  null: z.null(),
  any: z.any(),
  unknown: z.unknown(),
  json: z.json(),
  literal: z.literal("a"),
  literals: z.literal(["a", 1, true, null]),
  enum: z.enum(["red", "green"]),
  enum_numbers: z.enum({ A: 1, B: 2 }),
  template: z.templateLiteral(["v", z.int(), ".", z.enum(["x", "y"])]),
  template_number: z.templateLiteral([z.number(), z.enum(["px", "em"])]),
  object: z.object({ a: z.string(), b: z.int().optional() }),
  strict: z.strictObject({ a: z.string(), b: z.boolean() }),
  loose: z.looseObject({ a: z.string() }),
  catchall: z.object({ a: z.string() }).catchall(z.int()),
  partial: z.object({ a: z.string(), b: z.int() }).partial(),
  extended: z.object({ a: z.string() }).extend({ b: z.int() }),
  empty: z.object({}),
  nested: z.object({ a: z.object({ b: z.array(z.object({ c: z.int() })) }) }),
  array: z.array(z.string()),
  array_bounds: z.array(z.int()).min(1).max(3),
  array_length: z.array(z.boolean()).length(2),
  tuple: z.tuple([z.string(), z.int()]),
  tuple_rest: z.tuple([z.string()], z.int()),
  tuple_optional: z.tuple([z.string(), z.int().optional()]),
  record: z.record(z.string(), z.int()),
  record_enum: z.record(z.enum(["a", "b"]), z.int()),
  record_partial: z.partialRecord(z.enum(["a", "b"]), z.int()),
  record_pattern: z.record(z.string().regex(/^x-[a-z]+$/), z.string()),
  record_bounds: z.record(z.string().min(1).max(5), z.boolean()),
  record_uuid: z.record(z.uuid(), z.int()),
  record_email: z.record(z.email(), z.int()),
  record_template: z.record(z.templateLiteral(["item-", z.int()]), z.string()),
  record_union: z.record(z.union([z.literal("a"), z.string().regex(/^b/)]), z.int()),
  record_numbers: z.record(z.number(), z.string()),
  record_of_sets: z.record(z.string(), z.array(z.string())),
  loose_record: z.looseRecord(z.string().regex(/^_/), z.int()),
  union: z.union([z.string(), z.int(), z.null()]),
  union_numbers: z.union([z.int(), z.number()]),
  xor: z.xor([z.string(), z.int()]),
  xor_numbers: z.xor([z.int(), z.number()]),
  discriminated: z.discriminatedUnion("kind", [Dog, Cat]),
  intersection: z.intersection(z.object({ a: z.string() }), z.object({ b: z.int() })),
  nullable: z.string().nullable(),
  nullable_object: z.object({ a: z.int() }).nullable(),
  nullable_enum: z.enum(["a", "b"]).nullable(),
  nullish: z.object({ a: z.string().nullish() }),
  optional: z.object({ a: z.string().optional() }),
  default: z.object({ a: z.string().default("x"), b: z.array(z.int()).default([]) }),
  prefault: z.object({ a: z.string().prefault("x") }),
  catch: z.object({ a: z.int().catch(3) }),
  readonly: z.object({ a: z.array(z.string()).readonly() }).readonly(),
  pipe: z.pipe(z.string(), z.string().min(2)),
  transform: z.string().transform((text) => text.length),
  preprocess: z.preprocess((value) => value, z.int()),
  coerce: z.coerce.number(),
  stringbool: z.stringbool(),
  refine: z.string().refine((text) => text.length > 1),
  brand: z.string().brand("Name"),
  describe: z.string().describe("a name"),
  lazy: z.lazy(() => z.array(z.string())),
  recursive: Category,
  shared: z.object({ first: Named, second: Named }),
  promise: z.promise(z.string()),
  set: z.set(z.string()),
  map: z.map(z.string(), z.int()),
  date: z.date(),
  bigint: z.bigint(),
  undefined_: z.object({ a: z.undefined() }),
  never: z.object({ a: z.never().optional() }),
  file: z.file(),
};
const found = new Map();
for (const [name, shape] of Object.entries(shapes)) {
  for (const [target, suffix] of [
    ["draft-2020-12", ""],
    ["draft-7", ", draft-7"],
  ]) {
    for (const io of ["output", "input"]) {
      let schema;
      try {
        schema = z.toJSONSchema(shape, { io, target, reused: "ref" });
      } catch {
        continue; // a type that JSON has not, such as a date
      }
      const { $schema, ...bare } = schema;
      const text = JSON.stringify(bare);
      const isKnown = [...found.values()].some((known) => known.text === text);
      const written = suffix ? JSON.stringify(schema) : text;
      if (!isKnown) found.set(`${name}${io === "input" ? ", input" : ""}${suffix}`, { text, written });
    }
  }
}
const lines = [...found].map(([name, { written }]) => `  ${JSON.stringify(name)}: ${written}`);
const file = new URL("../unit/constraints/zod_schemas.json", import.meta.url);
writeFileSync(file, `{\n${lines.join(",\n")}\n}\n`);
