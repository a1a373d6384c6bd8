"""An IPython kernel driven by jupyter_client over ZMQ."""

from channel import serve
from jupyter_client.manager import start_new_kernel

manager, client = start_new_kernel()


def run(code: str) -> str:
    """Run one cell, until reply and idle are both seen."""
    printed: list[str] = []

    def collect(message: dict) -> None:
        content = message["content"]
        printed.append(content.get("text") or content.get("data", {}).get("text/plain", ""))

    client.execute_interactive(code, output_hook=collect, timeout=30)
    return "".join(printed)


try:
    serve(run)
finally:
    client.stop_channels()
    manager.shutdown_kernel(now=True)
