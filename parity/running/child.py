"""Call a function in a child process. Its result counts only if the child reported it; the code there may end the process."""

import json
import os
import secrets
import subprocess
import tempfile
from typing import Any

from parity.process import WATCHED, interpreter


class Ended(Exception):
    """The process ended without its end record: `how`, and the user's file that it was importing then, if any."""

    def __init__(self, how: str, importing: str | None):
        self.how, self.importing = how, importing
        where = f"importing {importing} ended the process" if importing else "the process ended before it was done"
        super().__init__(f"{where} ({how})")


def call(target: str, arguments: list[str], seconds: float | None = None, **popen: Any) -> Any:
    """The answer of `target`, "module:function" of this package, called with text arguments in a child process.

    The function reports with `process.tell(answer=…)`; its exit code says nothing, for anyone can exit with 0.

    Raises:
        Ended: when the process is over, or `seconds` have passed, and there is no answer.
    """
    nonce = secrets.token_hex(8)
    with tempfile.TemporaryFile() as channel:
        env = os.environ | {WATCHED: f"{channel.fileno()}:{nonce}:{os.getpid()}"}
        command = [*interpreter(target), *arguments]
        process = subprocess.Popen(command, env=env, pass_fds=[channel.fileno()], **popen)
        try:
            code = process.wait(seconds)
            how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        except subprocess.TimeoutExpired:
            how = f"no answer in {seconds:.0f} s"
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        channel.seek(0)
        events = list(_genuine(channel.read(), nonce, process.pid))
    importing: str | None = None
    for event in events:
        if "answer" in event:
            return event["answer"]
        importing = event.get("importing", importing)
    raise Ended(how, importing)


def _genuine(content: bytes, nonce: str, pid: int) -> Any:
    for line in content.split(b"\n"):
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict) and event.get("nonce") == nonce and event.get("pid") == pid:
            yield event
