"""The demo's trainer process: trains, publishes, and keeps its own bytes so that others can be compared with them.

Line protocol: each `next` on standard input is one optimiser step and one published version; each line on standard
output is one JSON object that describes a ready version. The end of standard input ends the process.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import time
from pathlib import Path

from mailboat.errors import MailboatError
from mailboat.trainer import PublishedVersion, Publisher


def main() -> int:
    """Run until standard input ends."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--server", required=True)
    parser.add_argument("--project", required=True)
    parser.add_argument("--run", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    arguments = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        _serve(arguments)
    except MailboatError as error:
        print(f"trainer: {error}", file=sys.stderr)
        return 1
    return 0


def _serve(arguments: argparse.Namespace) -> None:
    from scripts.demonstration.encoder import Encoder

    folder: Path = arguments.folder
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint = folder / "state.pt"
    encoder = Encoder()
    if checkpoint.exists():
        encoder.load(checkpoint)
    with Publisher(
        arguments.server, arguments.project, arguments.run, os.environ["MAILBOAT_TOKEN"], state_dir=folder / "published"
    ) as publisher:
        # The first version of a start is the state as it stands: the anchor on a fresh start, else what was saved last.
        _publish(publisher, encoder, folder)
        for line in sys.stdin:
            if line.strip() != "next":
                continue
            encoder.step()
            encoder.save(checkpoint)
            _publish(publisher, encoder, folder)


def _publish(publisher: Publisher, encoder: object, folder: Path) -> PublishedVersion:
    from safetensors.torch import save_file

    from scripts.demonstration.encoder import Encoder

    assert isinstance(encoder, Encoder)
    served, side_files = encoder.served(), encoder.side_files()
    version = publisher.publish(served, step=encoder.step_count, side_files=side_files)
    version.wait_ready()
    # The trainer's own bytes, written by the safetensors package and by nothing of ours.
    own = folder / "own" / f"v{version.number:06d}"
    own.mkdir(parents=True, exist_ok=True)
    save_file(served, own / "model.safetensors")
    for name, content in side_files.items():
        (own / name).write_bytes(content)
    print(
        json.dumps(
            {
                "number": version.number,
                "digest": version.digest,
                "patch_bytes": version.patch_bytes,
                "full_bytes": version.full_bytes,
                "changed": version.changed,
                "elements": version.elements,
                "step": encoder.step_count,
                "loss": encoder.loss,
                "ready_at": time.time(),
                "own": str(own),
            }
        ),
        flush=True,
    )
    return version


if __name__ == "__main__":
    sys.exit(main())
