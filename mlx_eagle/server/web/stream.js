// One request to the server, and its stream of events.

const BROKE_OFF = "The connection broke off before the answer was complete: the server has stopped, or the network failed.";
const NOT_REACHED = "The server could not be reached: it has stopped, or the network failed.";

/** What is said to the user, in a sentence. */
class Failure extends Error {
  constructor(sentence, status = 0) {
    super(sentence);
    this.status = status;
  }
}

function headers(key) {
  const found = { "Content-Type": "application/json" };
  if (key) found.Authorization = `Bearer ${key}`;
  return found;
}

/** Ask; `take` gets each chunk, `wait` how much of the prompt is read. Raises Failure. */
async function ask(body, key, signal, take, wait) {
  let response;
  try {
    response = await fetch("v1/chat/completions", {
      method: "POST",
      headers: headers(key),
      body: JSON.stringify({
        ...body,
        stream: true,
        stream_options: { include_usage: true, include_draft: true },
      }),
      signal,
    });
  } catch (error) {
    throw signal.aborted ? error : new Failure(NOT_REACHED);
  }
  if (!response.ok) throw new Failure(await sentenceOf(response), response.status);
  for await (const line of linesFrom(response.body, signal)) {
    const progress = /^: keepalive (\d+)\/(\d+)/.exec(line);
    if (progress) wait(Number(progress[1]), Number(progress[2]));
    if (!line.startsWith("data: ")) continue;
    if (line === "data: [DONE]") return;
    let chunk;
    try {
      chunk = JSON.parse(line.slice(6));
    } catch {
      throw new Failure(BROKE_OFF); // in the midst of a line
    }
    if (chunk.error) throw new Failure(asSentence(chunk.error.message), chunk.error.code);
    take(chunk);
  }
  throw new Failure(BROKE_OFF);
}

async function* linesFrom(body, signal) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    let found;
    try {
      found = await reader.read();
    } catch (error) {
      throw signal.aborted ? error : new Failure(BROKE_OFF);
    }
    if (found.done) break;
    const lines = (rest + found.value).split("\n");
    rest = lines.pop();
    yield* lines;
  }
  if (rest) yield rest;
}

async function sentenceOf(response) {
  try {
    const { error } = await response.json();
    return asSentence(error.message);
  } catch {
    return `The server answered with status ${response.status} and no reason.`;
  }
}

const asSentence = (text) => text.charAt(0).toUpperCase() + text.slice(1);
