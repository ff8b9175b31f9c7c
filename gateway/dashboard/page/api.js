/* Talking to the gateway: the key (kept in this tab only), single questions, and the live stream. */

const KEPT = "warmgate-key";

export class Locked extends Error {}

export const key = {
  get: () => sessionStorage.getItem(KEPT),
  set: (value) => sessionStorage.setItem(KEPT, value),
  forget: () => sessionStorage.removeItem(KEPT),
};

export async function ask(path, query, signal) {
  const headers = key.get() ? { authorization: `Bearer ${key.get()}` } : {};
  const response = await fetch(`/dashboard/api/${path}?${new URLSearchParams(query)}`, { headers, signal, cache: "no-store" });
  if (response.ok) return response;
  const told = await response.json().then((body) => body.detail, () => null);
  const message = typeof told === "string" ? told : `The gateway answered ${response.status}.`;
  throw response.status === 401 || response.status === 403 ? new Locked(message) : new Error(message);
}

/* Each overview as it comes; ends when the gateway ends the stream. Comments of the stream are told to `remark`. */
export async function* live(query, signal, remark) {
  const response = await ask("live", query, signal);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      if (event.startsWith("data: ")) yield JSON.parse(event.slice(6));
      else if (event.startsWith(": ")) remark(event.slice(2));
    }
  }
}

export async function save(path, query, name) {
  const response = await ask(path, { ...query, format: "csv" });
  const link = document.createElement("a");
  link.href = URL.createObjectURL(await response.blob());
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}
