"""The live page in a real browser without a window, which the test asks by the browser's debugging protocol."""

import asyncio
import contextlib
import itertools
import os
import shutil
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from servedplans import Served, good

aiohttp = pytest.importorskip("aiohttp", reason="serving needs the extra: pip install 'autosplit[serve]'")

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), "")
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-crash-reporter",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-sync",
    "--disable-extensions",
)
ROWS = "[...document.querySelectorAll('#{} tbody tr')].map(row => [...row.cells].map(cell => cell.textContent))"

Evaluate = Callable[[str], Awaitable[Any]]


@contextlib.asynccontextmanager
async def browsing(url: str, profile: Path) -> AsyncIterator[Evaluate]:
    """A function that evaluates JavaScript on the page."""
    words = [BROWSER, *FLAGS, "--remote-debugging-port=0", f"--user-data-dir={profile}", url]
    quiet = {"stdout": asyncio.subprocess.DEVNULL, "stderr": asyncio.subprocess.DEVNULL}
    browser = await asyncio.create_subprocess_exec(*words, **quiet)
    try:
        port_file = profile / "DevToolsActivePort"
        async with asyncio.timeout(60):
            while not (port_file.exists() and port_file.read_text().count("\n")):
                await asyncio.sleep(0.05)
        port = port_file.read_text().split()[0]
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/json") as answer:
                (page,) = [one for one in await answer.json() if one["type"] == "page"]
            async with session.ws_connect(page["webSocketDebuggerUrl"]) as link:
                numbers = itertools.count()

                async def evaluate(expression: str) -> Any:
                    number = next(numbers)
                    what = {"expression": expression, "returnByValue": True}
                    await link.send_json({"id": number, "method": "Runtime.evaluate", "params": what})
                    while (found := await link.receive_json(timeout=30)).get("id") != number:
                        continue
                    return found["result"]["result"].get("value")

                yield evaluate
    finally:
        family = [psutil.Process(browser.pid), *psutil.Process(browser.pid).children(recursive=True)]
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        await browser.wait()
        assert not psutil.wait_procs(family[1:], timeout=30)[1]


async def shown(evaluate: Evaluate, expression: str, holds: Callable[[Any], bool]) -> Any:
    """The value of the expression, once it is as it should be."""
    end_s = time.monotonic() + 60
    while not holds(found := await evaluate(expression)):
        assert time.monotonic() < end_s, f"the page shows {found}"
        await asyncio.sleep(0.1)
    return found


@pytest.mark.skipif(not BROWSER, reason="no chromium or google-chrome is installed")
def test_the_page_shows_what_happens_while_it_happens(served: Served, tmp_path: Path) -> None:
    async def ask(number: int) -> None:
        for seed in range(number):
            status, _ = await asyncio.to_thread(served.call, "POST", "/v2/models/mlp/infer", good(seed))
            assert status == 200

    async def story() -> None:
        await ask(5)
        async with browsing(served.url, tmp_path / "profile") as evaluate:
            await shown(evaluate, "document.getElementById('state').textContent", lambda text: text == "live")
            (model,) = await evaluate(ROWS.format("models"))
            assert model[0] == "mlp" and model[2] == "ready" and all(time.endswith(" ms") for time in model[6:9])
            stages = await evaluate(ROWS.format("stages"))
            assert [row[0] for row in stages] == ["first", "second"] and "dead" not in {row[4] for row in stages}
            await ask(20)
            done = [int(row[7]) + 20 for row in stages]
            await shown(evaluate, ROWS.format("stages"), lambda rows: [int(row[7]) for row in rows] >= done)
            assert await evaluate("document.querySelectorAll('#stages meter').length") == 2
            (network,) = served.application.host.networks()
            os.kill(served.application.host[network].pids[0], signal.SIGKILL)
            await ask(1)
            restarts = int(model[9]) + 1
            (model,) = await shown(evaluate, ROWS.format("models"), lambda rows: int(rows[0][9] or 0) == restarts)
            assert await evaluate("document.querySelectorAll('.bad').length") == 0

    asyncio.run(story())
