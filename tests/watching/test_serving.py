"""Who is let in by a page's server, and what it gives away."""

import contextlib
import http.client
import json
import re
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme
from test_following import begin, write
from test_gathering import a_run, phase

from offbeat.bench.report import write_run
from offbeat.errors import ConfigError
from offbeat.run.orders import Order, OrderBox
from offbeat.transport.terms import load_terms
from offbeat.watching import client as client_module
from offbeat.watching import serving
from offbeat.watching.access import COOKIE, GOOD_FOR_S, Access, host_name, make_pass
from offbeat.watching.client import RemoteSource, is_address
from offbeat.watching.hub import Hub
from offbeat.watching.serving import PageServer, listen, split_at

TOKEN = b"a-token-that-nobody-can-guess"


@contextlib.contextmanager
def serve(path: Path, token: bytes | None = None, **more: Any) -> Iterator[PageServer]:
    sock = listen("127.0.0.1:0")
    port = sock.getsockname()[1]
    access = Access(token, names=("trainer",), port=port, is_secure="tls" in more)
    with PageServer(Hub(path), sock, access, **more) as server:
        yield server


@pytest.fixture
def page(run_dir: Path) -> Iterator[PageServer]:
    write_run(run_dir, workers=2, gradients=50)
    with serve(run_dir) as server:
        yield server


@pytest.fixture
def guarded(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PageServer]:
    monkeypatch.setattr(serving, "FAILED_PAUSE_S", 0.01)
    write_run(run_dir, workers=2, gradients=50)
    with serve(run_dir, TOKEN) as server:
        yield server


def port_of(server: PageServer) -> int:
    return int(server.socket.getsockname()[1])


def ask(
    server: PageServer, path: str = "/", method: str = "GET", body: str = "", **headers: str
) -> tuple[int, dict[str, str], str]:
    """Status, headers by their names in small letters, and what came; of a stream one event."""
    port = port_of(server)
    line = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    known = {"Host": f"127.0.0.1:{port}"}
    known |= {name.replace("_", "-"): value for name, value in headers.items()}
    with contextlib.closing(line):
        line.request(method, path, body=body or None, headers=known)
        answer = line.getresponse()
        found = {name.lower(): value for name, value in answer.getheaders()}
        if found["content-type"].startswith("text/event-stream"):
            lines = []
            while not (lines and lines[-1].startswith("data: ")):
                lines.append(answer.readline().decode())
            text = lines[-1].removeprefix("data: ")
        else:
            text = answer.read().decode()
        return answer.status, found, text


def own(server: PageServer, **more: str) -> dict[str, str]:
    """As the page itself asks."""
    origin = server.url.rstrip("/")
    return {"Origin": origin, "Content_Type": "application/json", **more}


def cookie(server: PageServer, token: bytes = TOKEN, ago_s: float = 0) -> str:
    return f"{COOKIE}-{port_of(server)}={make_pass(token, time.time() - ago_s)}"


# -- the page --------------------------------------------------------------------------------------


def test_the_page_needs_nothing_from_elsewhere(page: PageServer) -> None:
    status, headers, text = ask(page)
    assert status == 200 and text.startswith("<!doctype html>")
    assert not re.findall(r"""(?:src|href)=["'](?!#|data:,)""", text)
    assert set(re.findall(r"https?://[^\s\"'`)]+", text)) == {"http://www.w3.org/2000/svg"}
    policy = headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy and "*" not in policy and "frame-ancestors 'none'" in policy
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["cache-control"] == "no-store" and headers["referrer-policy"] == "no-referrer"


def test_what_a_run_is_called_is_not_taken_for_the_page(tmp_path: Path) -> None:
    path = tmp_path / "<" / "script>alert(1)<"
    write_run(path, workers=1, gradients=5)
    with serve(path) as server:
        _, _, text = ask(server)
    assert '{"single": "script>alert(1)\\u003c"' in text and "alert(1)<" not in text


def test_a_stream_of_summaries(page: PageServer) -> None:
    status, headers, text = ask(page, "/events?run=run")
    view = json.loads(text)
    assert status == 200 and headers["content-type"].startswith("text/event-stream")
    assert view["since"] == 0 and view["about"]["recipe"] == "made-up"


@pytest.mark.parametrize(
    "path",
    ["/nothing", "/../etc/passwd", "/events?run=../..", "/log?run=run/../..&role=x", "/.git"],
)
def test_there_are_no_other_pages(page: PageServer, path: str) -> None:
    status, headers, text = ask(page, path)
    assert status == 404 and "root:" not in text
    assert headers["content-security-policy"].startswith("default-src 'none'")


def test_a_log_by_its_role_alone(page: PageServer, run_dir: Path) -> None:
    (run_dir / "logs").mkdir()
    (run_dir / "logs" / "master.log").write_text("one\ntwo\n")
    assert json.loads(ask(page, "/log?run=run&role=master")[2]) == ["one", "two"]
    assert json.loads(ask(page, "/log?run=run&role=..%2Fconfig")[2]) == []


# -- whom a request is meant for, and who asks -----------------------------------------------------


@pytest.mark.parametrize(
    "host", ["localhost:{}", "127.0.0.1:{}", "[::1]:{}", "10.1.2.3", "trainer"]
)
def test_it_is_known_by_these_names(page: PageServer, host: str) -> None:
    assert ask(page, Host=host.format(port_of(page)))[0] == 200


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "", "localhost.evil.example"])
def test_a_name_of_somebody_elses_that_leads_here(page: PageServer, host: str) -> None:
    for path in ("/", "/events?run=run", "/setup"):
        assert ask(page, path, Host=host)[0] == 421


@pytest.mark.parametrize("path", ["/setup", "/events?run=run", "/log?run=run&role=master"])
def test_another_site_reads_nothing(page: PageServer, path: str) -> None:
    for headers in ({"Sec_Fetch_Site": "cross-site"}, {"Origin": "http://evil.example"}):
        status, found, _ = ask(page, path, **headers)
        assert status == 403 and "access-control-allow-origin" not in found


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "https://127.0.0.1:{port}"},
        {"Origin": "http://127.0.0.1:1"},
        {"Origin": "http://127.0.0.1:{port}", "Sec_Fetch_Site": "same-site"},
    ],
)
def test_another_site_gives_no_orders(run_dir: Path, headers: dict[str, str]) -> None:
    folder = begin(run_dir)
    write(folder, "engine", phase("start", 1.0))
    with folder.locked(), serve(run_dir) as server:
        told = {k: v.format(port=port_of(server)) for k, v in headers.items()}
        body = json.dumps({"run": "run", "what": "stop"})
        assert ask(server, "/order", "POST", body, Content_Type="text/plain", **told)[0] == 403
        own_way = {**own(server), "Content_Type": "text/plain"}
        assert ask(server, "/order", "POST", body, **own_way)[0] == 415
        assert not folder.orders.exists()


def test_the_page_gives_orders(run_dir: Path) -> None:
    folder = begin(run_dir)
    write(folder, "engine", *a_run(2, 5))
    with folder.locked(), serve(run_dir) as server:
        body = json.dumps({"run": "run", "what": "slow", "worker": 1, "factor": 2})
        status, _, text = ask(server, "/order", "POST", body, **own(server))
        assert status == 202 and json.loads(text)["words"].startswith("that worker 1 takes 2 times")
        for body in ("{", "[]", '{"what": "stop"}', '{"run": "run", "what": "rm"}'):
            assert ask(server, "/order", "POST", body, **own(server))[0] == 409
        long = json.dumps({"run": "run", "what": "stop", "more": "x" * 5000})
        assert ask(server, "/order", "POST", long, **own(server))[0] == 413
        assert ask(server, "/elsewhere", "POST", "{}", **own(server))[0] == 404
    assert OrderBox(folder.orders).take() == [Order("slow", 1, 2.0)]


def test_what_is_neither_asked_for_nor_posted(page: PageServer) -> None:
    assert ask(page, "/", "DELETE")[0] == 501
    assert ask(page, "/", "OPTIONS", Origin="http://evil.example")[0] == 501


# -- the token -------------------------------------------------------------------------------------


def test_without_the_token_nothing_is_shown(guarded: PageServer) -> None:
    status, _, text = ask(guarded)
    assert status == 200 and "Which token?" in text and "made-up" not in text
    for path in ("/setup", "/events?run=run", "/log?run=run&role=master"):
        assert ask(guarded, path)[0] == 401
    assert (
        ask(guarded, "/order", "POST", '{"run": "run", "what": "stop"}', **own(guarded))[0] == 401
    )


def test_the_token_is_asked_once(guarded: PageServer) -> None:
    found = make_pass(TOKEN, time.time())
    status, headers, _ = ask(guarded, "/login", "POST", found, **own(guarded))
    assert status == 204
    kept = headers["set-cookie"]
    assert "HttpOnly" in kept and "SameSite=Strict" in kept and "Path=/" in kept
    assert TOKEN.decode() not in kept
    assert ask(guarded, "/setup", Cookie=kept.partition(";")[0])[0] == 200
    assert "Which token?" not in ask(guarded, Cookie=f"a=b; {kept.partition(';')[0]}")[2]


@pytest.mark.parametrize(
    "found",
    [
        "",
        "secret",
        make_pass(b"another-token-than-that-one", time.time()),
        make_pass(TOKEN, time.time() - GOOD_FOR_S - 10),
        make_pass(TOKEN, time.time() + 3 * 24 * 3600),
        make_pass(TOKEN, time.time()).replace(".", "0."),
        TOKEN.decode(),
        "\x00" * 100,
    ],
    ids=["none", "a word", "another token", "old", "early", "changed", "the token", "zeros"],
)
def test_a_wrong_pass_is_sent_away(guarded: PageServer, found: str) -> None:
    status, headers, _ = ask(guarded, "/login", "POST", found or "0", **own(guarded))
    assert status == 403 and "set-cookie" not in headers
    shown = re.sub(r"[^\w.-]", "", found)
    assert ask(guarded, "/setup", Cookie=f"{COOKIE}-{port_of(guarded)}={shown}")[0] == 401


def test_nobody_logs_in_from_another_site(guarded: PageServer) -> None:
    found = make_pass(TOKEN, time.time())
    assert ask(guarded, "/login", "POST", found, Origin="http://evil.example")[0] == 403


def test_a_pass_is_good_after_the_server_was_restarted(run_dir: Path) -> None:
    """It is the token's, not the server's."""
    found = make_pass(TOKEN, 1000.0)
    assert Access(TOKEN, now=lambda: 2000.0).is_pass(found)
    assert not Access(TOKEN, now=lambda: 2000.0 + GOOD_FOR_S).is_pass(found)
    assert not Access(b"x" * 20, now=lambda: 2000.0).is_pass(found)


def test_another_pages_cookie_is_none_of_ours(guarded: PageServer) -> None:
    mine = cookie(guarded)
    assert ask(guarded, "/setup", Cookie=mine)[0] == 200
    assert ask(guarded, "/setup", Cookie=mine.replace(f"-{port_of(guarded)}=", "-1="))[0] == 401
    assert ask(guarded, "/setup", Cookie="=;=; \x7f")[0] == 401


def test_other_users_of_this_machine_are_sent_away(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(run_dir, workers=1, gradients=5)
    monkeypatch.setattr(serving, "same_user_here", lambda sock: False)
    with serve(run_dir) as server, pytest.raises((http.client.HTTPException, OSError)):
        ask(server)
    with serve(run_dir, TOKEN, same_user=False) as server:
        assert ask(server)[0] == 200, "there the token says who may look"


# -- how many, and for how long --------------------------------------------------------------------


def test_only_so_many_look_on(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "MAX_WATCHERS", 2)
    write_run(run_dir, workers=1, gradients=5)
    with serve(run_dir) as server, contextlib.ExitStack() as stack:
        for _ in range(2):
            line = http.client.HTTPConnection("127.0.0.1", port_of(server), timeout=10)
            stack.callback(line.close)
            line.request("GET", "/events?run=run")
            answer = stack.enter_context(contextlib.closing(line.getresponse()))
            assert answer.status == 200
        status, _, text = ask(server, "/events?run=run")
        assert status == 503 and "look on already" in text
        assert ask(server)[0] == 200, "the page itself is there"


def test_strangers_who_say_nothing_are_few_and_do_not_stay(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "MAX_CONNECTIONS", 3)
    monkeypatch.setattr(serving, "TIMEOUT_S", 0.3)
    monkeypatch.setattr(serving._Handler, "timeout", 0.3)
    write_run(run_dir, workers=1, gradients=5)
    with serve(run_dir) as server, contextlib.ExitStack() as stack:
        silent = []
        for _ in range(3):
            silent.append(socket.create_connection(("127.0.0.1", port_of(server)), timeout=5))
            stack.enter_context(silent[-1])
        with socket.create_connection(("127.0.0.1", port_of(server)), timeout=5) as one_more:
            assert one_more.recv(1) == b"", "there is no place"
        assert [line.recv(1) for line in silent] == [b""] * 3, "they have had their time"
        assert ask(server)[0] == 200


def test_closing_ends_what_is_under_way(run_dir: Path) -> None:
    write_run(run_dir, workers=1, gradients=5)
    with serve(run_dir) as server:
        line = http.client.HTTPConnection("127.0.0.1", port_of(server), timeout=10)
        line.request("GET", "/events?run=run")
        answer = line.getresponse()
        began_s = time.monotonic()
    assert time.monotonic() < began_s + 3
    assert answer.read().startswith(b"retry: 1000")
    answer.close()
    line.close()


# -- TLS, addresses, and a page as a source --------------------------------------------------------


def tls_files(folder: Path) -> dict[str, str]:
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1")
    files = {name: str(folder / f"{name}.pem") for name in ("tls_cert", "tls_key", "tls_ca")}
    certificate.cert_chain_pems[0].write_to_path(files["tls_cert"])
    certificate.private_key_pem.write_to_path(files["tls_key"])
    authority.cert_pem.write_to_path(files["tls_ca"])
    return files


def test_over_tls_with_a_token(run_dir: Path, tmp_path: Path) -> None:
    write_run(run_dir, workers=2, gradients=50)
    files = tls_files(tmp_path)
    token_file = tmp_path / "token.txt"
    token_file.write_bytes(TOKEN)
    terms = load_terms({}, str(token_file), files["tls_cert"], files["tls_key"])
    believing = load_terms({}, str(token_file), tls_ca=files["tls_ca"])
    with serve(run_dir, TOKEN, tls=terms.server_tls) as server:
        assert server.url.startswith("https://")
        there = RemoteSource(server.url, believing)
        assert there.setup() == {"single": "run"}
        stream = there.stream("run", lambda: False)
        assert json.loads(next(iter(stream)))["status"]["gradients"] == 50
        stream.close()  # type: ignore[attr-defined]
        kept = server.access.cookie("x")
        assert "; Secure" in kept
        with pytest.raises(ConfigError, match="cannot look at"):
            RemoteSource(server.url, load_terms({}, str(token_file))).setup()
        with pytest.raises(ConfigError, match="asks for a token"):
            RemoteSource(server.url, load_terms({}, tls_ca=files["tls_ca"])).setup()
        plain = http.client.HTTPConnection("127.0.0.1", port_of(server), timeout=10)
        plain.request("GET", "/")
        with pytest.raises((http.client.HTTPException, ssl.SSLError, OSError)):
            plain.getresponse()
        plain.close()


def test_a_page_that_is_served_elsewhere_is_served_here_too(run_dir: Path) -> None:
    folder = begin(run_dir)
    write(folder, "engine", *a_run(2, 5))
    with folder.locked(), serve(run_dir, TOKEN) as far:
        terms = load_terms({"OFFBEAT_TOKEN": TOKEN.decode()})
        sock = listen("127.0.0.1:0")
        relayed = PageServer(RemoteSource(far.url, terms), sock, Access(None))
        with relayed as here:
            assert json.loads(ask(here, "/setup")[2]) == {"single": "run"}
            assert json.loads(ask(here, "/events?run=run")[2])["status"]["gradients"] == 10
            body = json.dumps({"run": "run", "what": "checkpoint"})
            assert ask(here, "/order", "POST", body, **own(here))[0] == 202
    assert OrderBox(folder.orders).take() == [Order("checkpoint")]


def test_a_stream_goes_on_when_its_server_is_back(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "AGAIN_S", 0.05)
    write_run(run_dir, workers=2, gradients=50)
    with serve(run_dir) as server:
        port = port_of(server)
        stream = iter(
            RemoteSource(f"127.0.0.1:{port}", load_terms({})).stream("run", lambda: False)
        )
        assert json.loads(next(stream))["since"] == 0
    sock = listen(f"127.0.0.1:{port}")
    with PageServer(Hub(run_dir), sock, Access(None)):
        text = next(text for text in stream if text)
        assert json.loads(text)["since"] == 0, "from the beginning"
        stream.close()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("what", "is_one"),
    [
        ("http://127.0.0.1:6810", True),
        ("https://trainer/", True),
        ("trainer:6810", True),
        ("[::1]:6810", True),
        ("runs/one", False),
        ("trainer", False),
        ("ftp://x:1", False),
    ],
)
def test_what_an_address_looks_like(what: str, is_one: bool) -> None:
    assert is_address(what) == is_one


def test_where_a_page_is_served() -> None:
    assert split_at(None) == ("127.0.0.1", None)
    assert split_at("7000") == ("127.0.0.1", 7000)
    assert split_at("0.0.0.0:80") == ("0.0.0.0", 80)
    assert split_at("[::1]:80") == ("::1", 80) and split_at("::1") == ("::1", None)
    assert split_at("trainer") == ("trainer", None)
    for wrong in ("host:port", "host:99999", "host:1x"):
        with pytest.raises(ConfigError, match="is no address"):
            split_at(wrong)
    assert host_name("[::1]:80") == "::1" and host_name("a:1") == "a" and host_name("a") == "a"


def test_a_port_that_is_taken_is_told_and_of_none_the_next_is_free() -> None:
    with listen("127.0.0.1:0") as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match="cannot serve a page at"):
            listen(f"127.0.0.1:{port}")
    with listen(None) as first, listen(None) as second:
        assert first.getsockname()[1] != second.getsockname()[1]


def test_threads_that_serve_are_gone_with_the_server(run_dir: Path) -> None:
    write_run(run_dir, workers=1, gradients=5)
    before = set(threading.enumerate())
    with serve(run_dir) as server:
        ask(server)
    assert set(threading.enumerate()) <= before
