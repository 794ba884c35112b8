"""Who may look at a page and give orders: the token, the cookie, whom a request is meant for.

Used by serving.py; pure but for the clock. The token itself never travels: a browser, or whoever
else comes, makes a *pass* out of it, which is good for some weeks and for these pages only.

    pass = "1799999999.6f1c..."     when it ends, and HMAC-SHA256(token, "offbeat watch " + that)
"""

import hashlib
import hmac
import ipaddress
import socket
import time
from collections.abc import Callable, Mapping
from http.cookies import CookieError, SimpleCookie

COOKIE = "offbeat-watch"
GOOD_FOR_S = 30 * 24 * 3600
SKEW_S = 24 * 3600
"""By how much the clocks of two machines may differ."""
MAX_PASS = 128
PURPOSE = b"offbeat watch "


def make_pass(token: bytes, now_s: float) -> str:
    ends = str(int(now_s) + GOOD_FOR_S)
    return f"{ends}.{_mac(token, ends)}"


def _mac(token: bytes, ends: str) -> str:
    return hmac.new(token, PURPOSE + ends.encode(), hashlib.sha256).hexdigest()


class Access:
    """`token`: None asks for none. `names`: what this machine is called beside its addresses."""

    def __init__(
        self,
        token: bytes | None,
        *,
        names: tuple[str, ...] = (),
        port: int = 0,
        is_secure: bool = False,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.asks_token = token is not None
        self._token = token
        self._names = {"localhost", *(name.lower() for name in names)}
        self._cookie = (
            f"{COOKIE}-{port}"  # a browser keeps the ports of a host apart in nothing else
        )
        self._is_secure = is_secure
        self._now = now

    def is_pass(self, found: str) -> bool:
        if self._token is None:
            return True
        ends, _, mac = found[:MAX_PASS].partition(".")
        if not (ends.isascii() and ends.isdecimal()):
            return False
        is_ours = hmac.compare_digest(mac.encode(), _mac(self._token, ends).encode())
        now_s = self._now()
        return is_ours and now_s < int(ends) < now_s + GOOD_FOR_S + SKEW_S

    def may_look(self, headers: Mapping[str, str]) -> bool:
        return not self.asks_token or self.is_pass(self._pass_in(headers.get("Cookie", "")))

    def _pass_in(self, text: str) -> str:
        try:
            found = SimpleCookie(text).get(self._cookie)
        except CookieError:
            return ""
        return "" if found is None else found.value

    def cookie(self, found: str) -> str:
        """What keeps a pass in a browser, where no script sees it."""
        secure = "; Secure" if self._is_secure else ""
        how = f"HttpOnly; SameSite=Strict; Path=/; Max-Age={GOOD_FOR_S}{secure}"
        return f"{self._cookie}={found}; {how}"

    def header(self, token: bytes) -> str:
        """What somebody says who knows the token, and is no browser."""
        return f"{self._cookie}={make_pass(token, self._now())}"

    def is_for_us(self, host: str | None) -> bool:
        """Whether the browser was told to come here by our own name or address, and not by a name
        of somebody else's that leads here."""
        name = host_name(host or "")
        if name.lower() in self._names:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True

    def is_own_page(self, headers: Mapping[str, str], *, must_say: bool) -> bool:
        """Whether it is our own page that asks; `must_say`: that has to be known."""
        origin, site = headers.get("Origin"), headers.get("Sec-Fetch-Site")
        if site is not None and site not in ("same-origin", "none"):
            return False
        if origin is None:
            return not must_say
        scheme = "https" if self._is_secure else "http"
        return origin.lower() == f"{scheme}://{headers.get('Host', '')}".lower()


def host_name(address: str) -> str:
    """Of host:port, [::1]:port, or a host alone."""
    if address.startswith("["):
        return address[1:].partition("]")[0]
    return address.rpartition(":")[0] if address.count(":") == 1 else address


def own_names(at: str | None = None, *, asks: bool = False) -> tuple[str, ...]:
    """What this machine is called: as it knows itself, where a page is served (`at`), and, where
    somebody may be asked (`asks`), by others."""
    name = socket.gethostname()
    short = name.partition(".")[0]
    told = () if at is None else (host_name(at),)
    return (name, short, f"{short}.local", *told, *((socket.getfqdn(),) if asks else ()))
