"""OpenAI's interface: real clients and plain HTTP, ids and texts, limits, faults, and callers that leave."""

import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

import pytest
from generating.caches import VOCABULARY, expected
from pipelines import wait_until
from servedplans import first_event
from webservice.generators import LENGTH, LIMITS, SLOTS, Generating, generating

from autosplit.errors import RefusedError
from autosplit.generating.sources import Source

PROMPT, GREEDY = [5, 6, 7], {"temperature": 0}
CODES = {
    "model 'other' is not in service; the models that generate are: ids, words": "model_not_found",
    "parameter 'best_of' is not supported with the value 2": "unsupported_parameter",
    "at most 58 fit": "context_length_exceeded",
}


@pytest.fixture(scope="module")
def server() -> Iterator[Generating]:
    with generating() as found:
        yield found


def words(ids: list[int]) -> str:
    names = ["system", "user", "assistant"]
    return "".join(names[one] if one < 3 else f"w{one}" for one in ids)


def ask(server: Generating, path: str = "completions", **fields: Any) -> tuple[int, Any]:
    """Status and content of an answer; of a stream the list of its events."""
    status, content = server.call("POST", f"/v1/{path}", {"model": "ids", "prompt": PROMPT, **GREEDY, **fields})
    if isinstance(content, bytes):
        *events, last, end = content.decode().split("\n\n")
        assert (last, end) == ("data: [DONE]", "") or not fields.get("ends", True)
        return status, [json.loads(event.removeprefix("data: ")) for event in events]
    return status, content


def chat(server: Generating, content: Any = "w9 w8", **fields: Any) -> tuple[int, Any]:
    messages = [{"role": "user", "content": content}]
    return ask(server, "chat/completions", **{"model": "words", "messages": messages, "prompt": None, **fields})


def test_prompts_of_ids(server: Generating) -> None:
    status, answer = ask(server, max_tokens=6, user="me", n=1)
    (choice,) = answer["choices"]
    assert (status, answer["object"], answer["model"]) == (200, "text_completion", "ids")
    assert choice == {"index": 0, "text": "", "token_ids": expected(PROMPT, 6), "logprobs": None, "finish_reason": "length"}
    assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 6, "total_tokens": 9}
    num_before = len(server.pipeline.steps)
    _, answer = ask(server, prompt=[PROMPT, [1], [2] * 20])
    assert len(server.pipeline.steps[num_before]) == SLOTS, "the first step began before all prompts were there"
    assert [one["token_ids"] for one in answer["choices"]] == [expected(one, 16) for one in (PROMPT, [1], [2] * 20)]


def test_a_stream_of_ids(server: Generating) -> None:
    end = expected(PROMPT, 6)[4]
    wanted = expected(PROMPT, 6, [end])
    usage = {"include_usage": True}
    status, events = ask(server, max_tokens=6, stop=[end], stream=True, stream_options=usage)
    assert status == 200
    assert events.pop()["usage"]["completion_tokens"] == len(wanted)
    choices = [event["choices"][0] for event in events]
    assert [one["token_ids"] for one in choices] == [*([token] for token in wanted), []]
    assert [one["finish_reason"] for one in choices] == [None] * len(wanted) + ["stop"]
    _, events = ask(server, prompt=[[1], [2, 3]], max_tokens=4, stream=True)
    for index, prompt in enumerate(([1], [2, 3])):
        mine = [event["choices"][0] for event in events if event["choices"][0]["index"] == index]
        assert [token for one in mine for token in one["token_ids"]] == expected(prompt, 4)


def test_texts_and_stop_words(server: Generating) -> None:
    answer = ask(server, model="words", prompt="w5 w6 w7", max_tokens=6)[1]
    assert answer["choices"][0]["text"] == words(expected(PROMPT, 6))
    stop = words(expected(PROMPT, 4)[2:])
    for stream in (False, True):
        found = ask(server, model="words", prompt="w5 w6 w7", stop=[stop, "nowhere"], max_tokens=50, stream=stream)[1]
        choices = [event["choices"][0] for event in found] if stream else found["choices"]
        assert "".join(one["text"] for one in choices) == words(expected(PROMPT, 2))
        assert choices[-1]["finish_reason"] == "stop"
    generator = server.application.repository.get("words").generator
    wait_until(lambda: not generator.num_running)
    assert generator.stats().num_failed == 2, "the tokens after a stop word are not waited for"


def test_a_chat(server: Generating) -> None:
    prompt = [1, 9, 8, 2]
    answer = chat(server, max_tokens=5)[1]
    assert answer["object"] == "chat.completion"
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": words(expected(prompt, 5))}
    assert (
        chat(server, [{"type": "text", "text": "w9"}, {"type": "text", "text": " w8"}], max_completion_tokens=5)[1]["choices"]
        == answer["choices"]
    )
    events = chat(server, stream=True, max_tokens=5)[1]
    deltas = [event["choices"][0]["delta"] for event in events]
    assert [one.get("role") for one in deltas] == ["assistant"] + [None] * 5
    assert "".join(one["content"] for one in deltas) == words(expected(prompt, 5))
    assert chat(server)[1]["usage"]["total_tokens"] == LENGTH + 1, "it goes on as long as there is room"


def test_draws_follow_the_seed(server: Generating, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    submit_all = server.generator.submit_all

    def noted(generations: Any, *limits: Any) -> None:
        seen.extend(one.sampling for one in generations)
        submit_all(generations, *limits)

    monkeypatch.setattr(server.generator, "submit_all", noted)
    ask(server, temperature=None, max_tokens=1)
    ask(server, temperature=0.5, top_p=0.9, top_k=7, seed=11, repetition_penalty=1.5, max_tokens=1)
    ask(server, seed=-1, top_k=-1, n=3, max_tokens=1)
    assert (seen[0].temperature, seen[0].top_p) == (1.0, 1.0)
    given = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "seed": 11, "repetition_penalty": 1.5}
    assert {name: getattr(seen[1], name) for name in given} == given
    assert len({one.seed for one in seen[2:]}) == 3, "each choice draws for itself"
    assert {one.top_k for one in seen[2:]} == {0}


def test_several_choices_of_a_prompt(server: Generating) -> None:
    answer = ask(server, n=3, max_tokens=4)[1]
    assert [(one["index"], one["token_ids"]) for one in answer["choices"]] == list(enumerate([expected(PROMPT, 4)] * 3))
    assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 12, "total_tokens": 15}, "a prompt counts once"


def test_a_prompt_that_an_encoder_reads_takes_no_room_of_its_answer(server: Generating, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Source(LENGTH, SLOTS, 1, (0,), vocabulary=VOCABULARY)
    monkeypatch.setattr(server.generator, "capacity", replace(server.generator.capacity, source=source))
    seen: list[Any] = []

    def refuse(generations: Any, timeout_s: float) -> None:
        seen.extend(generations)
        raise RefusedError("full")

    monkeypatch.setattr(server.generator, "submit_all", refuse)
    assert ask(server, prompt=[1] * LENGTH, max_tokens=LENGTH)[0] == 429
    assert [(len(one.source), one.sampling.max_new_tokens) for one in seen] == [(LENGTH, LENGTH)]


def test_programs_written_for_other_servers(server: Generating) -> None:
    said = [{"role": "user", "name": "me", "content": "w9"}, {"role": "assistant", "content": "w8", "refusal": None}]
    neutral = {"response_format": {"type": "text"}, "tools": [], "logit_bias": {}, "min_p": 0, "top_k": -1, "seed": 2**63 - 1}
    assert chat(server, messages=said, max_tokens=2, **neutral)[0] == 200
    end = expected([1, 9, 8, 2], 3)[2]
    texts = server.application.repository.get("words").generator.texts
    usual, texts.ends = texts.ends, (end,)
    try:
        lengths = [chat(server, max_tokens=9, ignore_eos=one)[1]["usage"]["completion_tokens"] for one in (False, True)]
    finally:
        texts.ends = usual
    assert lengths == [3, 9]
    assert server.call("GET", "/v1/models/ids")[1]["max_model_len"] == LENGTH
    served = server.application.repository._served
    words_model = served.pop("words")
    try:
        assert ask(server, model=None, max_tokens=1)[1]["model"] == "ids", "the only model needs no name"
    finally:
        served["words"] = words_model


@pytest.mark.parametrize(
    ("fields", "status", "param", "said"),
    [
        ({"model": "other"}, 404, None, "model 'other' is not in service; the models that generate are: ids, words"),
        ({"prompt": "a text"}, 400, "prompt", "has no tokenizer at hand; send the ids"),
        ({"stop": "a text"}, 400, "stop", "has no tokenizer at hand"),
        ({"model": None}, 400, "model", "names no model; the models that generate are: ids, words"),
        ({"best_of": 2}, 400, "best_of", "parameter 'best_of' is not supported with the value 2"),
        ({"logprobs": 1}, 400, "logprobs", "'logprobs' is not supported"),
        ({"best_off": 1}, 400, "best_off", "'best_off' is not supported"),
        ({"prompt": None}, 400, "prompt", "parameter 'prompt'"),
        ({"prompt": []}, 400, "prompt", "there is no prompt"),
        ({"prompt": [1.5]}, 400, "prompt", "parameter 'prompt'"),
        ({"prompt": [[]]}, 400, None, "it is empty"),
        ({"prompt": [97]}, 400, None, "97 is no token id"),
        ({"prompt": [1] * 62}, 400, "prompt", "maximum context length is 60 tokens. The prompt has 62, so no new one fits."),
        ({"max_tokens": 59}, 400, "prompt", "at most 58 fit"),
        ({"max_tokens": 0}, 400, "max_tokens", "greater than or equal to 1"),
        ({"n": 129}, 400, "n", "less than or equal to 128"),
        ({"max_tokens": "5"}, 400, "max_tokens", "valid integer"),
        ({"temperature": -1, "top_p": 2}, 400, None, "temperature must be at least 0, but is -1"),
        ({"stop": ""}, 400, "stop", "is empty"),
        ({"stop": [1] * 17}, 400, "stop", "at most 16"),
    ],
)
def test_faults_have_openais_shape(server: Generating, fields: dict[str, Any], status: int, param: str | None, said: str) -> None:
    for stream in (False, True):
        found, content = ask(server, **{**fields, "stream": stream})
        assert (found, content["error"]["param"]) == (status, param)
        assert said in content["error"]["message"]
        assert content["error"]["type"] == "invalid_request_error"
        assert content["error"]["code"] == CODES.get(said, content["error"]["code"])


def test_faults_of_chats_and_bodies(server: Generating) -> None:
    for fields, said in (
        ({"messages": []}, "at least 1 item"),
        ({"content": [{"type": "image_url"}]}, "parts of the type 'text'"),
        ({"model": "ids"}, "has no tokenizer at hand"),
        ({"tools": [{}]}, "parameter 'tools' is not supported"),
        ({"messages": [{"role": "user", "content": "w9", "audio": 1}]}, "parameter 'messages.0.audio'"),
    ):
        status, content = chat(server, **fields)  # type: ignore[arg-type]
        assert (status, said in content["error"]["message"]) == (400, True), content
    for body, status in ((b"{", 400), (b"[]", 400), (b"\xff", 400), (b" " * 100_001, 413)):
        found, content = server.call("POST", "/v1/completions", body)
        assert (found, content["error"]["type"]) == (status, "invalid_request_error")
    assert server.call("GET", "/v1/nothing")[1]["error"]["code"] == "unknown_url"
    assert "generates, and has no tensors" in server.call("POST", "/v2/models/ids/infer", {})[1]["error"]
    assert server.call("GET", "/v1/models/words")[1]["id"] == "words"


def test_a_full_queue_and_a_late_answer_are_refused() -> None:
    with generating(replace(LIMITS, request_s=2.0)) as server, ThreadPoolExecutor(8) as pool:
        server.pipeline._holds = True
        calls = [pool.submit(ask, server, max_tokens=9) for _ in range(SLOTS + 2)]  # the last two fill the queue
        wait_until(lambda: (server.generator.num_running, server.generator.num_waiting) == (SLOTS, 2))
        status, content = ask(server)
        assert (status, content["error"]["type"], content["error"]["code"]) == (429, "rate_limit_error", "rate_limit_exceeded")
        assert {call.result()[0] for call in calls} == {504}
        server.pipeline.release()
        assert ask(server, max_tokens=2)[1]["choices"][0]["token_ids"] == expected(PROMPT, 2)


def test_a_failure_in_a_stream_is_its_last_event(server: Generating) -> None:
    poison = 95
    status, content = ask(server, prompt=[poison])
    assert (status, content["error"]["type"]) == (500, "server_error")
    status, content = server.call("POST", "/v1/completions", {"model": "ids", "prompt": [poison], "stream": True})
    assert status == 200
    (event,) = content.decode().strip().split("\n\n")
    assert json.loads(event.removeprefix("data: "))["error"]["message"] == "poison"


@pytest.mark.parametrize("stream", [False, True])
def test_a_caller_that_leaves_frees_its_slot(server: Generating, stream: bool) -> None:
    place = urlsplit(server.url)
    body = json.dumps({"model": "ids", "prompt": [[1], [2]], "max_tokens": 50, "stream": stream}).encode()
    server.pipeline._holds = True
    callers = [socket.create_connection((place.hostname or "", place.port or 0)) for _ in range(2)]
    for caller in callers:
        caller.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
    wait_until(lambda: (server.generator.num_running, server.generator.num_waiting) == (SLOTS, 2))
    (shown,) = [one["sequences"] for one in first_event(server.url)["models"] if one["name"] == "ids"]
    assert shown == {"num_waiting": 2, "num_running": SLOTS}
    turns = server.generator._turns
    taken_in = [*turns._schedulers[0]._running, *(one for *_, one in turns._waiting)]
    for caller in callers:
        caller.close()
    left = len(server.pipeline.steps) + 2 * SLOTS  # steps that are under way may end
    wait_until(lambda: all(generation.future.cancelled() for generation in taken_in))
    server.pipeline.release()
    wait_until(lambda: not server.generator.num_running and not server.generator.num_waiting)
    assert len(server.pipeline.steps) <= left


def test_counters(server: Generating) -> None:
    def value(line: str) -> float:
        text = server.call("GET", "/metrics")[1].decode()
        return next((float(found.rpartition(" ")[2]) for found in text.splitlines() if found.startswith(line)), 0.0)

    lines = ['autosplit_tokens_total{kind="prompt",model="ids"}', 'autosplit_tokens_total{kind="new",model="ids"}']
    lines += ['autosplit_first_token_seconds_count{model="ids"}']
    before = list(map(value, lines))
    ask(server, max_tokens=5, stream=True)
    assert [value(line) - was for line, was in zip(lines, before, strict=True)] == [3, 5, 1]
    assert value('autosplit_http_requests_total{model="ids",status="200"}') >= 1


def test_openais_own_client() -> None:
    openai = pytest.importorskip("openai", reason="openai is not installed")
    with (
        generating(token="secret") as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0) as client,
    ):
        assert [model.id for model in client.models.list()] == ["ids", "words"]
        found = client.completions.create(model="ids", prompt=PROMPT, max_tokens=6, temperature=0)
        assert found.choices[0].token_ids == expected(PROMPT, 6)
        stream = client.completions.create(model="words", prompt="w5 w6 w7", max_tokens=6, temperature=0, stream=True)
        assert "".join(event.choices[0].text for event in stream) == words(expected(PROMPT, 6))
        said = [{"role": "user", "content": "w9 w8"}]
        asked = {"model": "words", "messages": said, "max_tokens": 5, "temperature": 0}
        assert client.chat.completions.create(**asked).choices[0].message.content == words(expected([1, 9, 8, 2], 5))
        events = client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
        *chunks, last = events
        assert "".join(event.choices[0].delta.content for event in chunks) == words(expected([1, 9, 8, 2], 5))
        assert last.usage.completion_tokens == 5
        with pytest.raises(openai.NotFoundError, match="not in service"):
            client.completions.create(model="other", prompt=PROMPT)
        with pytest.raises(openai.BadRequestError, match="'best_of' is not supported"):
            client.completions.create(model="ids", prompt=PROMPT, best_of=3)
        with pytest.raises(openai.APIError, match="poison"):
            list(client.completions.create(model="ids", prompt=[95], stream=True))
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="other").models.list()
        with client.completions.create(model="ids", prompt=[1], max_tokens=50, stream=True) as left:
            next(iter(left))
        wait_until(lambda: not server.generator.num_running)
