"""Members whose leader speaks TLS: who trusts its authority and knows the secret follows, and nobody else."""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from mailboat.commands.island import command
from mailboat.island import sync
from mailboat.island.members import follower
from mailboat.island.sidecar.serving import Address, HttpServer, ListenError
from mailboat.island.stop import Stop
from tests.island.contract_server import ContractServer
from tests.island.fleet import Trainer, held_state, island
from tests.island.members import leading, member
from tests.waiting import eventually, free_port


@dataclass(frozen=True)
class Authority:
    """PEM files: an authority, and the certificate that it gave 127.0.0.1."""

    ca_file: str
    certificate: str
    key: str


def authority(folder: Path, name: str) -> Authority:
    """An authority of its own, as a site has one."""
    folder.mkdir()
    own, leaf = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    now = datetime.datetime.now(datetime.UTC)

    def signed(subject: str, key: ec.EllipticCurvePrivateKey, *extensions: tuple[x509.ExtensionType, bool]) -> bytes:
        builder = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)]))
            .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=1))
        )
        for extension, critical in extensions:
            builder = builder.add_extension(extension, critical)
        return builder.sign(own, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)

    usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(own.public_key())
    subject = x509.SubjectKeyIdentifier.from_public_key(own.public_key())
    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    basic = x509.BasicConstraints(ca=True, path_length=0)
    (folder / "ca.pem").write_bytes(signed(name, own, (basic, True), (usage, True), (subject, False)))
    (folder / "leader.pem").write_bytes(signed("leader", leaf, (address, False), (issuer, False)))
    (folder / "leader.key").write_bytes(
        leaf.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return Authority(*(str(folder / file) for file in ("ca.pem", "leader.pem", "leader.key")))


def test_members_follow_over_tls_and_strangers_do_not(
    server: ContractServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follower, "pause_before", lambda _failures: 0.02)
    site, other = authority(tmp_path / "site", "site"), authority(tmp_path / "other", "other")
    port = free_port()
    leader, tls = f"https://127.0.0.1:{port}", (site.certificate, site.key)
    a, b = tmp_path / "a", tmp_path / "b"

    def turned_away(words: str, **options: Any) -> None:
        """A member that gets nothing, and what it says about it."""
        store = tmp_path / "stranger"
        with member(store, port, **{"leader": leader, **options}) as stranger:
            eventually(lambda: any(words in line for line in stranger.lines))
        assert not (store / "marker.json").exists()

    with Trainer(server, tmp_path) as trainer, island(server, a, **leading(port, tls=tls)) as running:
        trainer.step()
        eventually(lambda: any(f"expected at {leader}" in line for line in running.lines))
        turned_away("is not trusted")
        turned_away("is not trusted", ca_file=other.ca_file)
        turned_away("can't be reached", leader=f"http://127.0.0.1:{port}")
        turned_away("not this island's; give both sides the same file", ca_file=site.ca_file, secret="x" * 40)
        assert server.applied(0) is None, "no stranger was taken for the member"
        with member(b, port, ca_file=site.ca_file):
            server.wait_for(lambda: server.applied(0))
            trainer.step()
            server.wait_for(lambda: server.applied(1))
    assert held_state(a) == held_state(b) == trainer.state().digest


def test_the_command_passes_certificate_key_and_authority_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site, seen = authority(tmp_path / "site", "site"), []
    monkeypatch.setattr(Stop, "on_signals", lambda _stop: None)
    monkeypatch.setattr(sync, "run_island", lambda options, **_: seen.append(options.members.tls))
    monkeypatch.setattr(follower, "run_member", lambda options, **_: seen.append((options.leader, options.ca_file)))
    secret, runner = str(tmp_path / "secret"), CliRunner()
    leader = ["run", "--server", "http://x", "--project", "p", "--store", "s", "--member", "b", "--members-listen"]
    leader += ["127.0.0.1:1", "--members-secret", secret, "--members-tls", site.certificate, site.key]
    member = ["member", "--leader", "https://x", "--name", "b", "--store", "s", "--secret", secret]
    for arguments in (leader, [*member, "--ca-file", site.ca_file]):
        done = runner.invoke(command, arguments, catch_exceptions=False)
        assert done.exit_code == 0, done.output
    assert seen == [(site.certificate, site.key), ("https://x", site.ca_file)]


def test_a_certificate_that_can_not_be_used_is_told_at_once(tmp_path: Path) -> None:
    site, other = authority(tmp_path / "site", "site"), authority(tmp_path / "other", "other")
    for files in ((site.certificate, other.key), (site.key, site.certificate), (site.certificate, "nowhere")):
        with pytest.raises(ListenError, match="certificate"):
            HttpServer("members' door", Address("127.0.0.1", 0), tls=files)
