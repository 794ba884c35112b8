"""What two ends of a connection go by: a token that both know, certificates, how long a silence.

Out of files and the environment, for servers and those who connect to them (security.py) and for
`offbeat watch`. Imports no torch.
"""

import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from offbeat.errors import ConfigError

TOKEN_VARIABLE = "OFFBEAT_TOKEN"
MIN_TOKEN_BYTES = 16
PEER_TIMEOUT_S = 30.0


@dataclass(frozen=True, kw_only=True)
class Terms:
    token: bytes | None = field(default=None, repr=False)
    server_tls: ssl.SSLContext | None = field(default=None, repr=False)
    client_tls: ssl.SSLContext | None = field(default=None, repr=False)
    peer_timeout_s: float = PEER_TIMEOUT_S
    """How long what was sent may stay unacknowledged before the other machine counts as gone."""


OPEN = Terms()
"""Those of one's own machine."""


def load_terms(
    environment: Mapping[str, str],
    token_file: str | None = None,
    tls_cert: str | None = None,
    tls_key: str | None = None,
    tls_ca: str | None = None,
) -> Terms:
    """Out of files and the environment; a ConfigError says what is wrong with them, never what is
    in them."""
    if (tls_cert is None) != (tls_key is None):
        raise ConfigError("--tls-cert and --tls-key belong together: give both")
    try:
        server_tls = client_tls = None
        if tls_cert is not None:
            server_tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            server_tls.load_cert_chain(tls_cert, tls_key)
            if tls_ca is not None:  # then whoever comes has to show a certificate too
                server_tls.load_verify_locations(tls_ca)
                server_tls.verify_mode = ssl.CERT_REQUIRED
        if tls_ca is not None or tls_cert is not None:
            client_tls = ssl.create_default_context(cafile=tls_ca)
            if tls_cert is not None:
                client_tls.load_cert_chain(tls_cert, tls_key)
        for context in (server_tls, client_tls):
            if context is not None:
                context.minimum_version = ssl.TLSVersion.TLSv1_3
    except OSError as error:  # which an SSLError is, too
        files = [name for name in (tls_cert, tls_key, tls_ca) if name]
        missing = [name for name in files if not Path(name).is_file()]
        reason = "there is no such file" if missing else str(error)
        raise ConfigError(f"cannot use {', '.join(missing or files)} for TLS: {reason}") from error
    token = _load_token(environment, token_file)
    return Terms(token=token, server_tls=server_tls, client_tls=client_tls)


def _load_token(environment: Mapping[str, str], token_file: str | None) -> bytes | None:
    where = f"the file {token_file}" if token_file else TOKEN_VARIABLE
    if token_file is not None:
        try:
            token = Path(token_file).expanduser().read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not a text"
            raise ConfigError(f"cannot read a token from {token_file}: {reason}") from None
    elif TOKEN_VARIABLE in environment:
        token = environment[TOKEN_VARIABLE].strip()
    else:
        return None
    if len(token.encode()) < MIN_TOKEN_BYTES:
        what = "too short" if token else "missing: it is empty"
        raise ConfigError(
            f"the token in {where} is {what}; offbeat token makes one that cannot be guessed"
        )
    return token.encode()
