"""A program that uses the embedded server: says where it is, then waits for one line of input ("stop" or "leave")."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import psycopg
import psycopg_binary  # noqa: F401 - before rights are dropped, since the interpreter may lie in root's home

from controlplane.embedded import guard
from controlplane.embedded.postgres import EmbeddedPostgres, EmbeddedPostgresError


def main() -> int:
    home = Path(sys.argv[1])
    if len(sys.argv) > 2:
        guard.drop_to(int(sys.argv[2]), int(sys.argv[3]))
        if not os.access(sys.executable, os.X_OK):
            sys.executable = "/usr/bin/python3"
    server = EmbeddedPostgres(home)
    try:
        server.start()
    except EmbeddedPostgresError as error:
        print(error, flush=True)
        return 1
    with psycopg.connect(server.url) as connection:
        row = connection.execute("select current_setting('data_directory')").fetchone()
    print("ready", row[0] if row else "", flush=True)
    if sys.stdin.readline().strip() == "stop":
        server.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
