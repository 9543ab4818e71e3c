"""TCP addresses in ZeroMQ's form: one parser for IPv4, IPv6 and names."""

from __future__ import annotations

import ipaddress
import re
from typing import NamedTuple

_FORM = re.compile(r"tcp://(?:\[(?P<v6>[^\[\]]+)\]|(?P<host>[^:\[\]/\s]+)):(?P<port>[0-9]{1,5})")


class Address(NamedTuple):
    """Where to listen or to connect. Port 0: any free one (to listen only)."""

    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp://{host}:{self.port}"

    @classmethod
    def parse(cls, text: str) -> Address:
        """From `tcp://HOST:PORT`, an IPv6 host in brackets. Raises ValueError."""
        match = _FORM.fullmatch(text)
        if match is None or int(match["port"]) > 65535:
            raise ValueError(
                f"{text!r} is not an address: expected tcp://HOST:PORT, as tcp://127.0.0.1:5570 "
                "or tcp://[::1]:5570"
            )
        if match["v6"] is not None:
            try:
                return cls(str(ipaddress.IPv6Address(match["v6"])), int(match["port"]))
            except ValueError:
                raise ValueError(f"{match['v6']!r} in {text!r} is not an IPv6 address") from None
        return cls(match["host"], int(match["port"]))

    @property
    def is_loopback(self) -> bool:
        """True for hosts that only this machine can reach."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"
