"""Publishers' keys over the API: registered, endorsed, revoked; and what islands may learn from it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from click.testing import CliRunner

from controlplane import head_keys
from controlplane.accounts import services as accounts
from controlplane.registry import services as registry
from controlplane.registry.models import Project, Run
from mailboat.cli import cli
from mailboat.client import Api as Client
from mailboat.identity import fingerprint, new_key, public_half
from mailboat.signing import PUBLISHER, KeyDocument, endorse, endorsers
from tests.controlplane.api.test_calls import problem
from tests.controlplane.api.test_steering import change
from tests.controlplane.conftest import Api, enrol
from tests.controlplane.making import build, upload

pytestmark = pytest.mark.django_db
KEYS = "runs/minilm/keys"
ONE, TWO = new_key(), new_key()


@pytest.fixture
def operator(token: Callable[..., Api]) -> Api:
    return token("operator")


def test_keys_are_registered_once_endorsed_later_and_revoked_for_good(run: Run, operator: Api) -> None:
    body = {"public_key": public_half(ONE), "name": "trainer"}
    made = operator.post(KEYS, body)
    assert made.status_code == 201 and made.json()["fingerprint"] == fingerprint(public_half(ONE))
    assert operator.post(KEYS, body).status_code == 200
    document = KeyDocument(PUBLISHER, str(run.pk), public_half(TWO))
    again = {"public_key": public_half(TWO), "endorsement": endorse(document, ONE).to_dict()}
    assert operator.post(KEYS, again).status_code == 201
    strange = {**again["endorsement"], "payload": "e30="}
    problem(operator.post(KEYS, {**again, "endorsement": strange}), 422, "endorsement_invalid")
    listed = operator.get(KEYS).json()["results"]
    assert [row["public_key"] for row in listed] == [public_half(TWO), public_half(ONE)]
    address = f"{KEYS}/{made.json()['id']}"
    problem(change(operator, "delete", address, {}), 400, "invalid_request")
    gone = change(operator, "delete", address, {"reason": "lost"})
    assert gone.status_code == 200 and gone.json()["revoked_reason"] == "lost"
    problem(operator.post(KEYS, body), 409, "key_revoked")
    trust = operator.get("runs/minilm/trust").json()
    assert trust["revoked"] == [public_half(ONE)]
    assert trust["publishers"] == [{"public_key": public_half(TWO), "endorsement": again["endorsement"]}]
    assert [key["public_key"] for key in trust["heads"]] == list(head_keys.public().values())


def test_a_commit_without_the_signature_is_refused_with_its_code(
    run: Run, operator: Api, token: Callable[..., Api]
) -> None:
    operator.post(KEYS, {"public_key": public_half(ONE)})
    built = build(run, 0)
    upload(run, built)
    publisher = token("publisher")
    refused = publisher.post("runs/minilm/versions", {"envelope": built.envelope, "anchor": built.anchor})
    problem(refused, 422, "signature_missing")


def test_islands_read_the_keys_of_their_own_run_alone(run: Run, other_run: Run) -> None:
    _, credential = enrol(run, "porto")
    island = Api("harbour", credential)
    assert island.get("runs/minilm/trust").status_code == 200
    assert island.get(f"runs/{other_run.name}/trust").status_code == 404


def test_the_command_makes_registers_lists_and_revokes(server: str, transactional_db: None, tmp_path: object) -> None:
    project = registry.create_project("harbour", actor="test")
    run = registry.create_run(project, "minilm", actor="test")
    _, secret = accounts.create_token(Project.objects.get(pk=project.pk), "operator", "ops", actor="test")
    environment = {"MAILBOAT_SERVER": server, "MAILBOAT_PROJECT": "harbour", "MAILBOAT_TOKEN": secret}

    def mailboat(*arguments: str) -> str:
        done = CliRunner().invoke(cli, ["keys", *arguments], env=environment)
        assert done.exit_code == 0, done.output + repr(done.exception)
        assert "PRIVATE" not in done.output
        return done.output

    old, new = f"{tmp_path}/old.pem", f"{tmp_path}/new.pem"
    public = [mailboat("new", path).split()[0] for path in (old, new)]
    assert mailboat("show", old).split() == [public[0], mailboat("fingerprint", f"{old}.pub").strip()]
    mailboat("register", "minilm", old, "--name", "first")
    mailboat("register", "minilm", f"{new}.pub", "--endorsed-by", old)
    envelope = Client(server, "harbour", secret).trust("minilm").publishers[public[1]]
    document = KeyDocument(PUBLISHER, str(run.pk), public[1])
    assert envelope is not None and endorsers(envelope, document, [public[0]])
    assert mailboat("list", "minilm").count("in use") == 2
    assert "revoked: rotated" in mailboat("revoke", "minilm", public[0], "--reason", "rotated")
    assert mailboat("list", "minilm").count("in use") == 1
    assert mailboat("head-keys", "minilm").split()[0] in head_keys.public().values()
