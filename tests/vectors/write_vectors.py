"""Write the committed vectors from the plain twin: `python -m tests.vectors.write_vectors`.

A change of these files is a change of format 1, which is frozen.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from tests.vectors import plain

HERE = Path(__file__).parent
RUN = "6f1c0f0e-4a52-4c1d-9a53-0a5f5b0f7c11"

# name, dtype, shape, bytes
SUMS: list[tuple[str, str, list[int], int]] = [
    ("scalar", "F32", [], 4),
    ("one_byte", "U8", [1], 1),
    ("norm.weight", "BF16", [7], 14),
    ("matrix", "BF16", [3, 8], 48),
    ("odd_rows", "F16", [5, 3], 30),
    ("narrow", "BF16", [4, 1], 8),
    ("bytes", "I8", [2, 3, 5], 30),
    ("flags", "BOOL", [9], 9),
    ("fp8", "F8_E4M3", [3, 11], 33),
    ("wide", "F64", [2, 2], 32),
    ("complex", "C64", [3], 24),
    ("four_bits", "F4", [3, 6], 9),
    ("four_bits_across_rows", "F4", [2, 3], 3),
    ("six_bits", "F6_E2M3", [2, 4], 6),
    ("unknown", "X7", [3, 2], 21),
    ("unknown_across_rows", "X7", [4, 2], 21),
    ("empty", "F32", [0, 5], 0),
    ("größe/名前", "I64", [1, 3], 24),
]


def content(name: str, count: int) -> bytes:
    """Bytes that anyone can make again: SHA-256 of the name and a counter."""
    text = b"".join(hashlib.sha256(f"{name}:{block}".encode()).digest() for block in range(count // 32 + 1))
    return text[:count]


def _row(name: str, dtype: str, shape: list[int], count: int, unit: str | None = None) -> list[Any]:
    return ["target", name, dtype, shape, unit, *([count] if dtype.startswith("X") else [])]


def _inventories() -> list[dict[str, Any]]:
    cases: list[tuple[str, list[list[Any]], dict[str, str], str | None]] = [
        ("empty", [], {}, None),
        ("every dtype", [_row(*case) for case in SUMS], {}, None),
        (
            "alias, unit and quantiser",
            [
                _row("model.embed_tokens.weight", "BF16", [4, 8], 64),
                _row("model.layers.0.q.weight", "F8_E4M3", [4, 8], 32, "model.layers.0.q"),
                _row("model.layers.0.q.weight_scale_inv", "F32", [1, 1], 4, "model.layers.0.q"),
            ],
            {"lm_head.weight": "model.embed_tokens.weight"},
            '{"quant_method":"fp8","weight_block_size":[128,128]}',
        ),
        ("text that JSON escapes", [_row('a"\\\n\x01\x7f\u2028😀', "U8", [2], 2)], {}, None),
    ]
    found = []
    for title, rows, aliases, quantiser in cases:
        document = plain.inventory(rows, aliases, quantiser)
        found.append(
            {
                "title": title,
                "tensors": rows,
                "aliases": aliases,
                "quantiser": quantiser,
                "document": document.decode(),
                "sha256": hashlib.sha256(document).hexdigest(),
            }
        )
    return found


def _sums() -> list[dict[str, Any]]:
    found = []
    for name, dtype, shape, count in SUMS:
        data = content(name, count)
        seeds, sums = plain.seeds("target", name, dtype, shape), plain.sums("target", name, dtype, shape, data)
        found.append(
            {"name": name, "dtype": dtype, "shape": shape, "data": data.hex()}
            | {"seeds": [f"{seed:016x}" for seed in seeds], "sums": [f"{total:016x}" for total in sums]}
        )
    return found


def _states() -> list[dict[str, Any]]:
    found = []
    sides = {"config.json": b'{"model_type":"tiny"}', "1_Pooling/config.json": b"{}", "ä.txt": b""}
    for title, cases, side_files in (("nothing", [], {}), ("every dtype", SUMS, {}), ("side files", SUMS[:3], sides)):
        ordered = sorted(cases, key=lambda case: case[0].encode())
        document = plain.inventory([_row(*case) for case in ordered], {}, None)
        tensors = [content(case[0], case[3]) for case in ordered]
        blob, strong, digest = plain.state(document, tensors, side_files)
        found.append(
            {
                "title": title,
                "inventory": document.decode(),
                "tensors": [data.hex() for data in tensors],
                "side_files": {path: data.decode() for path, data in side_files.items()},
                "digests": (blob + strong).hex(),
                "state": digest,
            }
        )
    return found


def _documents() -> list[dict[str, Any]]:
    blob = {"sha256": "11" * 32, "size": 1234}
    first = {
        "format": "mailboat-manifest-1", "run": RUN, "epoch": 1, "number": 0, "parent": None, "state": "aa" * 32,
        "inventory": blob, "digests": {"sha256": "22" * 32, "size": 480}, "side_files": [], "patch": None,
        "elements": 1000, "full_bytes": 2000, "step": None,
    }  # fmt: skip
    side = {"path": "größe/config.json", "sha256": "33" * 32, "size": 0}
    second = first | {
        "number": 7, "parent": {"number": 0, "state": "aa" * 32}, "state": "bb" * 32, "side_files": [side], "step": 70,
        "patch": {"changed": 12, "parts": [blob, {"sha256": "44" * 32, "size": 2**63 - 1}]},
    }  # fmt: skip
    head = {
        "format": "mailboat-head-1", "run": RUN, "channel": "latest", "version": 7, "epoch": 1, "manifest": "55" * 32,
        "state": "bb" * 32, "generation": 1, "serial": 8, "issued": 1790000000, "expires": 1790086400,
    }  # fmt: skip
    found = []
    for kind, document, signatures in (
        ("manifest", first, []),
        ("manifest", second, [("publisher-1", b"\x00\x01\xfe\xff")]),
        ("head", head, [("registry-1", b"one"), ("registry-2", b"two!")]),
    ):
        payload = plain.canonical(document)
        text, signed = plain.envelope(f"application/vnd.mailboat.{kind}+json", payload, signatures)
        found.append(
            {
                "kind": kind,
                "document": document,
                "payload": payload.decode(),
                "sha256": hashlib.sha256(payload).hexdigest(),
                "signatures": [[key, signature.hex()] for key, signature in signatures],
                "envelope": text.decode(),
                "pae": signed.hex(),
            }
        )
    return found


def main() -> None:
    """Write all files."""
    for name, cases in (
        ("inventory", _inventories()),
        ("sums", _sums()),
        ("states", _states()),
        ("documents", _documents()),
    ):
        text = json.dumps(cases, ensure_ascii=False, indent=1)
        (HERE / f"{name}.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
