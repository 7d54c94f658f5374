"""Which keys an island believes: those of publishers, without whose signature it goes to no version, and those of the
control plane's heads.

Given at the start (`--publisher-key`), publishers' keys are all that counts. Without the option the first keys that the
control plane names are pinned: a lie told later changes nothing. From then on only a document signed by a key that is
trusted already makes another one trusted. It must never let the control plane's word alone add a key, and never drop
what was pinned because an option is missing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from mailboat.errors import ApiError, ManifestError, NotFound, Unreachable
from mailboat.identity import fingerprint
from mailboat.island.store import Store
from mailboat.manifest import Envelope
from mailboat.replies import StandingKeys
from mailboat.signing import HEAD, PUBLISHER, KeyDocument, endorsers, signers

NOTE = "trust"
LONGEST_CHAIN = 8  # of keys that vouch for each other
MANIFESTS = 64  # whose signers are remembered, so that a restart needs no network

Say = Callable[[str], None]
Ask = Callable[[str, str], Envelope | None]  # (purpose, public key) -> the document that vouches for it


class Untrusted(ManifestError):  # noqa: N818 - as the library's other errors, named for what happened
    """A document that no trusted key has signed; the version held goes on being served."""

    code = "untrusted"


class Trust:
    """The keys of one run, durable in the store's note. Safe to use from several threads."""

    def __init__(self, store: Store, run_id: str, given: Sequence[str], *, ask: Ask, say: Say) -> None:
        self._store = store
        self._run_id = run_id
        self._ask = ask
        self._say = say
        self._lock = threading.RLock()
        kept = store.note(NOTE) or {}
        if kept.get("run") != run_id:
            kept = {}
        self._publishers: dict[str, str] = dict(kept.get("publishers") or {})  # key -> how it came to be trusted
        self._heads: list[str] = list(kept.get("heads") or [])
        self._revoked: set[str] = set(kept.get("revoked") or [])
        self._signed: dict[str, list[str]] = dict(kept.get("signed") or {})  # manifest -> who signed it
        self._derived = kept.get("derived") is True
        self._asked: set[str] = set()
        roots = {key for key, how in self._publishers.items() if how == "given"}
        self.changed = bool(given) and set(given) != roots  # what was accepted before was judged by other keys
        if self.changed:
            self._publishers = dict.fromkeys(given, "given")
            self._keep()
        for key in self._publishers.keys() & self._revoked:
            say(f"the publisher's key {fingerprint(key)} was revoked and counts no more")

    @property
    def enforced(self) -> bool:
        """Whether publishers' keys are known, or have to be: then nothing without their signature is gone to."""
        return bool(self._publishers) or self._derived

    @property
    def given(self) -> bool:
        """Whether whoever started the island named the keys."""
        return "given" in self._publishers.values()

    @property
    def publishers(self) -> list[str]:
        """The publishers' keys that count."""
        with self._lock:
            return [key for key in self._publishers if key not in self._revoked]

    def heard(self, said: StandingKeys) -> None:
        """What the control plane says of keys: pins the first ones, and ends those that are revoked. The key of a
        worker that publishes a derived run is never pinned: only whoever starts the island can name it.
        """
        with self._lock:
            before = (len(self._publishers), len(self._heads), len(self._revoked), self._derived)
            self._derived = self._derived or said.derived
            if not self._publishers:
                self._publishers = dict.fromkeys(said.publishers, "first use")
                for key in self._publishers:
                    self._say(f"trusting the publisher's key {fingerprint(key)} from now on, as the first one met")
            if not self._heads:
                self._heads = list(dict.fromkeys(said.heads))
            for key in set(said.revoked) - self._revoked:
                self._revoked.add(key)
                if key in self._publishers:
                    self._say(f"the publisher's key {fingerprint(key)} was revoked and counts no more")
            if before != (len(self._publishers), len(self._heads), len(self._revoked), self._derived):
                self._keep()

    # -- manifests

    def knows(self, manifest: str, *, held: bool = False) -> bool:
        """Whether a manifest (SHA-256) was seen with the signature of a key that counts; of one that was revoked since,
        for a version that is ``held``.
        """
        with self._lock:
            counting = set(self._publishers) if held else set(self.publishers)
            return not counting.isdisjoint(self._signed.get(manifest, ()))

    def accepts(self, envelope: Envelope, *, held: bool = False) -> bool:
        """Whether a publisher that is trusted has signed the manifest in the envelope."""
        with self._lock:
            counting = set(self._publishers) if held else set(self.publishers)
            signed = signers(envelope, counting)
            if not signed:
                strangers = [s.keyid for s in envelope.signatures if s.keyid not in self._revoked]
                learnt = {key for key in strangers if self._learn(PUBLISHER, key, LONGEST_CHAIN)}
                signed = signers(envelope, learnt)
            if signed:
                self._signed.pop(envelope.payload_sha256, None)
                self._signed[envelope.payload_sha256] = sorted(signed)
                while len(self._signed) > MANIFESTS:
                    del self._signed[next(iter(self._signed))]
                self._keep()
            return bool(signed)

    def require(self, envelope: Envelope, number: int, *, held: bool = False) -> None:
        """Raises Untrusted for the manifest of a version that no trusted publisher has signed."""
        if not self.accepts(envelope, held=held):
            if self._derived and not self._publishers:
                raise Untrusted(
                    "The run is derived: a worker quantises and signs it, not its trainer. Start the island with "
                    "--publisher-key and that worker's key, which the run's page names, to trust it."
                )
            raise Untrusted(f"The manifest of version {number} {_why(envelope)} a publisher that this island trusts.")

    # -- heads

    def head_problem(self, envelope: Envelope) -> str:
        """Why a head can't be believed; empty when it can. Keys that sign heads no more are forgotten: a rotation ended
        them.
        """
        with self._lock:
            if not self._heads:
                return ""
            for key in (s.keyid for s in envelope.signatures if s.keyid not in self._heads):
                if key not in self._asked or not signers(envelope, self._heads):
                    self._learn(HEAD, key, LONGEST_CHAIN)
                    self._asked.add(key)
            signed = signers(envelope, self._heads)
            if not signed:
                return f"The head {_why(envelope)} the control plane whose key this island has; it is refused."
            if signed != set(self._heads):
                self._heads = [key for key in self._heads if key in signed]
                self._keep()
            return ""

    # -- keys that vouch for each other

    def _learn(self, purpose: str, key: str, steps: int) -> bool:
        """Whether a trusted key vouches for this one, directly or through others; then it is trusted as well."""
        trusted = set(self.publishers if purpose == PUBLISHER else self._heads)
        if key in trusted:
            return True
        if steps == 0 or key in self._revoked or not self._vouched(purpose, key, trusted, steps):
            return False
        if purpose == PUBLISHER:
            self._publishers[key] = "endorsed"
        else:
            self._heads.append(key)
        self._say(f"trusting the {purpose} key {fingerprint(key)}, for which a trusted key vouches")
        self._keep()
        return True

    def _vouched(self, purpose: str, key: str, trusted: set[str], steps: int) -> bool:
        try:
            envelope = self._ask(purpose, key)
            if envelope is None:
                return False
            document = KeyDocument(purpose, self._run_id if purpose == PUBLISHER else None, key)
            if endorsers(envelope, document, trusted):
                return True
            through = {s.keyid for s in envelope.signatures if self._learn(purpose, s.keyid, steps - 1)}
            return bool(endorsers(envelope, document, through))
        except NotFound:
            return False
        except (ManifestError, ApiError, Unreachable) as error:
            self._say(f"the key {fingerprint(key)} can't be looked into: {error}")
            return False

    def _keep(self) -> None:
        body = {
            "run": self._run_id,
            "publishers": self._publishers,
            "heads": self._heads,
            "derived": self._derived,
            "revoked": sorted(self._revoked),
            "signed": self._signed,
        }
        self._store.set_note(NOTE, body)


def _why(envelope: Envelope) -> str:
    return "is not signed by" if not envelope.signatures else "has no right signature of"
