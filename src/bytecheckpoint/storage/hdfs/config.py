"""The NameNodes of an hdfs:// URL, and the options of the client, from the usual Hadoop configuration.

`$HADOOP_CONF_DIR` (or `$HADOOP_HOME/etc/hadoop`) holds core-site.xml and hdfs-site.xml. The client library reads them too.
But it does not tell the addresses of the NameNodes, which a concat needs, and it does not know name services with one
NameNode, the default port, ${variables} and included files. So this module reads the files and passes all properties on.
"""

from __future__ import annotations

import getpass
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from xml.etree import ElementInclude, ElementTree

from bytecheckpoint.errors import UsageError
from bytecheckpoint.storage.base import UNENCODABLE

__all__ = ["Address", "ClusterAddress", "parse_url", "target_of"]

_DEFAULT_PORT = 8020
_FILES = ("core-site.xml", "hdfs-site.xml")
_VARIABLE = re.compile(r"\$\{([^{}$\s]+)\}")
#: Hadoop's limit for variables within variables.
_MAX_DEPTH = 20
_VARIABLES = (
    "HADOOP_CONF_DIR", "HADOOP_HOME", "HADOOP_USER_NAME", "HADOOP_PROXY_USER", "HADOOP_TOKEN_FILE_LOCATION", "KRB5CCNAME",
)  # fmt: skip

#: Host and port of a NameNode.
Address = tuple[str, int]


@dataclass(frozen=True, slots=True)
class ClusterAddress:
    """A file system and the configuration of its client. Equal targets can share one client.

    Attributes:
        authority: its name in URLs, "demo_0" or "host:port".
        namenodes: addresses of its NameNodes.
        options: configuration of the client. It takes precedence over the files that the client reads itself.
        user: the user name for the NameNode; "" with Kerberos.
        environment: the environment variables that the client reads.
    """

    authority: str
    namenodes: tuple[Address, ...]
    options: tuple[tuple[str, str], ...]
    user: str
    environment: tuple[tuple[str, str], ...]

    @property
    def secure(self) -> bool:
        """Return whether the cluster uses Kerberos or tokens."""
        return not self.user

    def rotated(self) -> ClusterAddress:
        """Return the same file system with its first NameNode moved to the end."""
        options = dict(self.options)
        names = f"dfs.ha.namenodes.{self.authority}"
        first, *others = options[names].split(",")
        options[names] = ",".join([*others, first])
        return replace(self, namenodes=(*self.namenodes[1:], self.namenodes[0]), options=tuple(sorted(options.items())))


def parse_url(url: str) -> tuple[str, str]:
    """Return authority and path of an hdfs:// URL. The path begins with "/" and, except for the root, does not end with it.

    Raises:
        UsageError: the URL is invalid.
    """
    authority, _, rest = url.partition("://")[2].partition("/")
    path = rest.strip("/")
    if "@" in authority:
        raise UsageError("an hdfs:// URL takes no user name: set HADOOP_USER_NAME, or use Kerberos")
    if UNENCODABLE.search(authority + path) or any(
        part in ("", ".", "..") or ":" in part for part in path.split("/") if path
    ):
        raise UsageError(
            f"{url!r} has an empty, '.' or '..' part, a colon or a control character: write hdfs://cluster/folder"
        )
    if not authority:
        default = _configuration().get("fs.defaultFS", "")
        if not default.startswith("hdfs://"):
            raise UsageError(
                f"{url!r} names no cluster, and {_where()} sets no fs.defaultFS of HDFS: write hdfs://cluster/folder"
            )
        authority = default.partition("://")[2].partition("/")[0]
    return authority, f"/{path}"


def target_of(authority: str) -> ClusterAddress:
    """Read the environment and the configuration of a cluster.

    Raises:
        UsageError: they are invalid.
    """
    properties = _configuration()
    options = {
        # The timeout for a DataNode: another one, or another block, is quicker than the default minute.
        "dfs.client.socket-timeout": "20000",
        # A write continues with the remaining DataNodes, as long as there is one.
        "dfs.client.block.write.replace-datanode-on-failure.best-effort": "true",
        **properties,
        # The client asks each NameNode once; `Cluster.run` decides about retries.
        "dfs.client.failover.sleep.base.millis": "100",
        "dfs.client.failover.sleep.max.millis": "1000",
    }
    namenodes = _namenodes(authority, properties, options)
    options["dfs.client.failover.max.attempts"] = str(len(namenodes) - 1)
    secure = properties.get("hadoop.security.authentication", "simple") != "simple"
    user = "" if secure else os.environ.get("HADOOP_USER_NAME") or getpass.getuser()
    environment = tuple((name, os.environ[name]) for name in _VARIABLES if name in os.environ)
    return ClusterAddress(authority, namenodes, tuple(sorted(options.items())), user, environment)


def _namenodes(authority: str, properties: dict[str, str], options: dict[str, str]) -> tuple[Address, ...]:
    """Return the addresses of the NameNodes, and add to `options` what the client needs to find them."""
    if ":" in authority:
        return (_address(authority, authority),)
    names = [name.strip() for name in properties.get(f"dfs.ha.namenodes.{authority}", "").split(",") if name.strip()]
    addresses = [properties.get(f"dfs.namenode.rpc-address.{authority}.{name}", "") for name in names]
    if names and all(addresses):
        options[f"dfs.ha.namenodes.{authority}"] = ",".join(names)  # for the client, blanks are part of the names
        return tuple(_address(authority, address) for address in addresses)
    if names:
        raise UsageError(
            f"{_where()} names the NameNodes {', '.join(names)} of {authority}, but not all their addresses"
        )
    # A name service with one NameNode, or a plain host name.
    only = properties.get(f"dfs.namenode.rpc-address.{authority}", authority)
    address = _address(authority, only)
    options[f"dfs.ha.namenodes.{authority}"] = "only"
    options[f"dfs.namenode.rpc-address.{authority}.only"] = f"{address[0]}:{address[1]}"
    return (address,)


def _address(authority: str, text: str) -> Address:
    host, colon, port = text.strip().rpartition(":") if ":" in text else (text.strip(), "", "")
    if not host or (colon and not (port.isdecimal() and 0 < int(port) < 1 << 16)):
        raise UsageError(f"{text!r} is no address of a NameNode of {authority}: write host:port")
    return host, int(port) if colon else _DEFAULT_PORT


def _folder() -> str:
    if folder := os.environ.get("HADOOP_CONF_DIR"):
        return folder
    home = os.environ.get("HADOOP_HOME")
    return os.path.join(home, "etc", "hadoop") if home else ""


def _where() -> str:
    return f"the configuration in {_folder()}" if _folder() else "the configuration (HADOOP_CONF_DIR is not set)"


def _configuration() -> dict[str, str]:
    """Return the properties of the files with their variables expanded; later files take precedence."""
    properties: dict[str, str] = {}
    folder = _folder()
    for name in _FILES if folder else ():
        path = os.path.join(folder, name)
        try:
            root = ElementTree.parse(path).getroot()
            ElementInclude.include(root, base_url=path)
        except FileNotFoundError as error:
            if error.filename == path:
                continue
            raise UsageError(f"cannot read the Hadoop configuration {path}: {error}") from None
        except (OSError, SyntaxError, ValueError) as error:
            raise UsageError(f"cannot read the Hadoop configuration {path}: {error}") from None
        for entry in root.iter("property"):
            key, value = entry.findtext("name"), entry.findtext("value")
            if key and value is not None:
                properties[key.strip()] = value.strip()
    return {key: _expand(value, properties) for key, value in properties.items()}


def _expand(text: str, properties: Mapping[str, str]) -> str:
    """Replace ${name} in `text` by that property and ${env.NAME} by that variable; unknown ones stay."""

    def value(match: re.Match[str]) -> str:
        name = match[1]
        return (os.environ if name.startswith("env.") else properties).get(name.removeprefix("env."), match[0])

    for _ in range(_MAX_DEPTH):
        before, text = text, _VARIABLE.sub(value, text)
        if text == before:
            break
    return text
