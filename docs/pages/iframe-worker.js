// The search of the site runs in a worker, which browsers refuse to pages that lie on disk. There a
// hidden frame takes its place: its script hears and posts messages as that of a worker does.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.documentElement.append(frame);
      this.inside = frame.contentWindow;
      this.inside.postMessage = (data) => this.tell(this, data);
      const script = this.inside.document.createElement("script");
      script.src = new URL(url, location.href);
      this.isReady = new Promise((resolve) => script.addEventListener("load", resolve));
      this.inside.document.documentElement.append(script);
    }

    postMessage(data) {
      this.isReady.then(() => this.tell(this.inside, data));
    }

    tell(listener, data) {
      const event = new MessageEvent("message", { data });
      listener.dispatchEvent(event);
      listener.onmessage?.(event);
    }
  };
}
