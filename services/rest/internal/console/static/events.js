// Server-sent events by `fetch`: EventSource can send no key.

/** The data of an answer's events, until it ends. */
export async function* readEvents(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      rest += value;
      for (let end; (end = rest.indexOf("\n\n")) >= 0;) {
        const event = rest.slice(0, end);
        rest = rest.slice(end + 2);
        const data = event.split("\n").filter((line) => line.startsWith("data:"));
        if (data.length) yield data.map((line) => line.slice(5).trimStart()).join("\n");
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
