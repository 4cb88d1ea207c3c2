"""Routes and middleware of the whole application, engines scripted."""

from __future__ import annotations

import json
import logging

import pytest

from gateway.app import ROUTES, Access
from gateway.config import MIN_BODY_LIMIT
from gateway.errors import EngineFailed, Overloaded, Unavailable
from gateway.stream import GenerationRequest
from protocol.version import VERSION
from tests.gateway import vocabularies
from tests.gateway.stub_engines import StubGateway

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
def gateway() -> StubGateway:
    gateway = StubGateway(vocabularies.characters())
    ids = gateway.sampled("hello")
    gateway.dispatcher.script = lambda _request, _index: ids
    return gateway


async def test_every_route_is_listed() -> None:
    listed = {(route.path, method) for route in ROUTES for method in (route.methods or set()) - {"HEAD"}}
    assert listed == {
        ("/v1/chat/completions", "POST"),
        ("/v1/completions", "POST"),
        ("/v1/models", "GET"),
        ("/v1/models/{model:path}", "GET"),
        ("/health", "GET"),
        ("/ready", "GET"),
        ("/version", "GET"),
        ("/metrics", "GET"),
    }


async def test_models(gateway: StubGateway) -> None:
    async with gateway.client() as client:
        listed = (await client.get("/v1/models")).json()
        (model,) = listed["data"]
        assert listed["object"] == "list"
        assert model.pop("created") > 1_700_000_000
        assert model == {"id": "tiny", "object": "model", "owned_by": "sluicegate", "max_model_len": 2048}
        assert (await client.get("/v1/models/tiny")).json()["id"] == "tiny"
        missing = await client.get("/v1/models/org/none")
        assert missing.status_code == 404
        assert missing.json()["error"]["code"] == "model_not_found"
        assert "'org/none'" in missing.json()["error"]["message"]


async def test_health_ready_version(gateway: StubGateway) -> None:
    async with gateway.client() as client:
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/ready")).status_code == 200
        assert (await client.get("/version")).json() == {"version": VERSION}
        gateway.router.served.clear()
        assert (await client.get("/health")).status_code == 200
        unready = await client.get("/ready")
        assert unready.status_code == 503
        assert unready.json()["error"]["type"] == "unavailable_error"


async def test_ready_loads_the_tokenizer_once(gateway: StubGateway) -> None:
    async with gateway.client() as client:
        for _ in range(2):
            assert (await client.get("/ready")).status_code == 200
        assert (await client.post("/v1/completions", json={"prompt": "a"})).status_code == 200
    assert gateway.router.num_fetches == 1


@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", {"prompt": "a"})])
async def test_the_model_is_checked(gateway: StubGateway, path: str, body: dict[str, object]) -> None:
    async with gateway.client() as client:
        answer = await client.post(path, json=body | {"model": "other"})
        assert answer.status_code == 404
        error = answer.json()["error"]
        assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", "model", "model_not_found")
        assert (await client.post(path, json=body | {"model": "tiny"})).json()["model"] == "tiny"
        assert (await client.post(path, json=body)).json()["model"] == "tiny"
        gateway.router.served["second"] = gateway.serving
        unsaid = await client.post(path, json=body)
        assert (unsaid.status_code, unsaid.json()["error"]["param"]) == (400, "model")
        gateway.router.served.clear()
        assert (await client.post(path, json=body)).status_code == 503


@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", {"prompt": "a"})])
async def test_the_wait_for_an_engine_is_counted(gateway: StubGateway, path: str, body: dict[str, object]) -> None:
    async with gateway.client() as client:
        assert (await client.post(path, json=body)).status_code == 200
        gateway.router.served.clear()
        gateway.dispatcher.returning = gateway.serving
        assert (await client.post(path, json=body | {"model": "tiny"})).status_code == 200
    at_once, later = gateway.dispatcher.waited_s
    assert at_once < 0.05 <= later


async def test_paths_and_methods_that_do_not_exist(gateway: StubGateway) -> None:
    async with gateway.client() as client:
        missing = await client.get("/v2/nothing")
        assert missing.status_code == 404
        assert missing.json()["error"]["message"] == "GET /v2/nothing: Not Found."
        wrong = await client.get("/v1/completions")
        assert wrong.status_code == 405
        assert wrong.headers["allow"] == "POST"
        assert wrong.json()["error"]["type"] == "invalid_request_error"


async def test_the_request_id_is_the_clients_or_a_new_one(gateway: StubGateway) -> None:
    async with gateway.client() as client:
        given = await client.post("/v1/completions", json={"prompt": "a"}, headers={"X-Request-Id": "mine-1"})
        assert given.headers["x-request-id"] == "mine-1"
        assert gateway.dispatcher.requests[-1].request_id == "mine-1"
        made = [(await client.get("/health")).headers["x-request-id"] for _ in range(2)]
        assert made[0] != made[1]
        assert len(made[0]) == 32
        for odd in ("a" * 129, "two words", ""):
            refused = await client.get("/health", headers={"X-Request-Id": odd})
            assert refused.headers["x-request-id"] != odd
        assert given.json()["id"] != made[0]


async def test_a_valid_traceparent_goes_to_the_engine(gateway: StubGateway) -> None:
    trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    async with gateway.client() as client:
        for given, passed in ((trace, trace), ("nonsense", "")):
            await client.post("/v1/completions", json={"prompt": "a"}, headers={"traceparent": given})
            assert gateway.dispatcher.requests[-1].traceparent == passed


async def test_the_api_key_guards_all_but_health_and_ready(gateway: StubGateway) -> None:
    gateway.access = Access(api_key="s3cret-é")
    right = {"Authorization": "Bearer s3cret-é".encode()}
    async with gateway.client() as client:
        for path in ("/v1/models", "/metrics", "/version", "/nowhere"):
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "s3cret-é".encode()}):
                refused = await client.get(path, headers=headers)  # type: ignore[arg-type]
                assert refused.status_code == 401
                error = refused.json()["error"]
                assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
                assert "s3cret" not in refused.text
                assert refused.headers["x-request-id"]
        assert (await client.get("/v1/models", headers=right)).status_code == 200  # type: ignore[arg-type]
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/ready")).status_code == 200


async def test_a_body_over_the_limit_is_refused_before_it_is_parsed(gateway: StubGateway) -> None:
    async with gateway.client() as client:
        announced = await client.post("/v1/completions", content=b"{" * (MIN_BODY_LIMIT + 1))
        assert announced.status_code == 413
        assert f"larger than {MIN_BODY_LIMIT} bytes" in announced.json()["error"]["message"]

        async def chunks():  # type: ignore[no-untyped-def]
            for _ in range(5):
                yield b"x" * (MIN_BODY_LIMIT // 4)

        unannounced = await client.post("/v1/completions", content=chunks())
        assert unannounced.status_code == 413
        assert (await client.post("/v1/completions", content=b"{" * MIN_BODY_LIMIT)).status_code == 400


async def test_the_body_limit_follows_the_longest_context_or_the_setting() -> None:
    gateway = StubGateway(vocabularies.characters(), context_length=100_000)
    async with gateway.client() as client:
        assert (await client.post("/v1/completions", content=b"{" * 3_200_000)).status_code == 400
        assert (await client.post("/v1/completions", content=b"{" * 3_200_001)).status_code == 413
    gateway.access = Access(max_body_bytes=1024)
    async with gateway.client() as client:
        assert (await client.post("/v1/completions", content=b"{" * 1025)).status_code == 413


@pytest.mark.parametrize(
    ("error", "status", "kind", "retry_after"),
    [
        (Overloaded("busy", retry_after_s=7), 429, "rate_limit_error", "7"),
        (Unavailable("gone"), 503, "unavailable_error", "1"),
        (EngineFailed("broken"), 500, "server_error", None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_refusals_of_the_dispatcher_are_statuses(
    gateway: StubGateway, error: Unavailable, status: int, kind: str, retry_after: str | None, stream: bool
) -> None:
    gateway.dispatcher.refusal = error
    async with gateway.client() as client:
        answer = await client.post("/v1/completions", json={"prompt": "a", "stream": stream})
    assert answer.status_code == status
    assert answer.json()["error"]["type"] == kind
    assert answer.headers.get("retry-after") == retry_after


async def test_an_unforeseen_error_is_a_500_without_its_text(
    gateway: StubGateway, caplog: pytest.LogCaptureFixture
) -> None:
    async def crash(_request: GenerationRequest, _waited_s: float) -> None:
        raise RuntimeError("secret detail")

    gateway.dispatcher.start = crash  # type: ignore[method-assign, assignment]
    async with gateway.client() as client:
        answer = await client.post("/v1/completions", json={"prompt": "a"}, headers={"X-Request-Id": "r7"})
    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "server_error"
    assert "secret" not in answer.text
    assert answer.headers["x-request-id"] == "r7"
    (record,) = [record for record in caplog.records if record.message == "request_crashed"]
    assert record.__dict__["request_id"] == "r7"


async def test_the_log_has_a_line_a_request_and_no_prompt(
    gateway: StubGateway, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with gateway.client() as client:
        await client.post("/v1/completions", json={"prompt": "very private"}, headers={"X-Request-Id": "r1"})
        await client.get("/health")
    (record,) = [record for record in caplog.records if record.message == "request"]
    facts = record.__dict__
    assert (facts["request_id"], facts["method"], facts["path"], facts["status"]) == (
        "r1",
        "POST",
        "/v1/completions",
        200,
    )
    assert facts["duration_ms"] > 0
    assert "private" not in json.dumps([str(record.__dict__) for record in caplog.records])


async def test_unknown_fields_are_let_through_when_the_gateway_says_so(gateway: StubGateway) -> None:
    body = {"prompt": "a", "zebra_two": 1}
    async with gateway.client() as client:
        assert (await client.post("/v1/completions", json=body)).status_code == 400
    gateway.allow_unknown_fields = True
    async with gateway.client() as client:
        assert (await client.post("/v1/completions", json=body)).status_code == 200


async def test_metrics_count_what_clients_saw(gateway: StubGateway) -> None:
    async with gateway.client() as client:
        await client.post("/v1/completions", json={"prompt": "abc", "n": 2, "max_tokens": 3})
        await client.post("/v1/completions", json={"prompt": "abc", "stream": True})
        await client.post("/v1/completions", json={"prompt": ""})
        lines = (await client.get("/metrics")).text.splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if line.startswith("sluicegate:"))

    def value(name: str, labels: str = 'model_name="tiny"') -> float:
        return float(values[f"sluicegate:{name}{{{labels}}}"])

    assert value("request_success_total", 'finished_reason="length",model_name="tiny"') == 3
    assert value("request_errors_total", 'status="400"') == 1
    assert value("request_prompt_tokens_sum") == 6
    assert value("request_generation_tokens_sum") == 6 + 5
    assert value("request_params_n_sum") == 3
    assert value("request_params_max_tokens_sum") == 3 + 16
    assert value("e2e_request_latency_seconds_count") == 2
    assert value("time_to_first_token_seconds_count") == 2
