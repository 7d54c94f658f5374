"""What the RL demo is made of: the task's rules, advantages and loss, and which answers may be learnt from."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch

from scripts.demonstration.rl.answers import Answers, BadAnswer
from scripts.demonstration.rl.grpo import CLIP_ABOVE, CLIP_BELOW, advantages, surrogate
from scripts.demonstration.rl.learner import Learner, Row, WrongModel
from scripts.demonstration.rl.moves import Move, move_after
from scripts.demonstration.rl.rollouts import Rollouts
from scripts.demonstration.rl.task import WORDS, Question, question, verdict
from tests.engines.models import tiny_llama
from tests.waiting import eventually, free_port


@pytest.mark.parametrize(
    ("answer", "ended", "reward"),
    [
        ("The river runs.", True, 1.0),
        ("A RIVER, at night", True, 1.0),
        ("The river runs and", False, 0.5),
        ("The sea is wide.", True, 0.5),
        ("The rivers run.", True, 0.5),
        ("driver", False, 0.0),
        (" \n", True, 0.0),
        ("", True, 0.0),
    ],
)
def test_the_reward_is_a_rule(answer: str, ended: bool, reward: float) -> None:
    assert verdict(Question("river"), answer, ended=ended).reward == reward


def test_every_word_is_asked_once_before_any_comes_again() -> None:
    turns = [[question(turn * len(WORDS) + place).word for place in range(len(WORDS))] for turn in range(2)]
    assert sorted(turns[0]) == sorted(turns[1]) == sorted(WORDS) and turns[0] != turns[1]
    assert "river." in Question("river").prompt


def test_advantages_are_in_units_of_the_groups_spread() -> None:
    found = advantages([1.0, 0.0, 0.5, 0.5])
    assert found == pytest.approx([math.sqrt(2), -math.sqrt(2), 0, 0], rel=1e-3)
    assert advantages([0.5] * 8) == [0.0] * 8


def test_the_gradient_on_fresh_samples_is_that_of_the_policy_gradient() -> None:
    new = torch.tensor([[-1.0, -2.0], [-0.5, -3.0]], requires_grad=True)
    mask = torch.tensor([[1.0, 1.0], [1.0, 0.0]])
    loss = surrogate(new, new.detach().clone(), torch.tensor([2.0, -1.0]), mask)
    loss.backward()
    assert torch.equal(new.grad, torch.tensor([[-2.0, -2.0], [1.0, 0.0]]))


@pytest.mark.parametrize(
    ("advantage", "ratio", "gradient"),
    [
        (1.0, 1 + CLIP_ABOVE + 0.1, 0.0),  # enough of it already
        (1.0, 1 - CLIP_BELOW - 0.1, -(1 - CLIP_BELOW - 0.1)),  # an old sample that became less likely
        (-1.0, 1 - CLIP_BELOW - 0.1, 0.0),
        (-1.0, 1 + CLIP_ABOVE + 0.1, 1 + CLIP_ABOVE + 0.1),
    ],
)
def test_ratios_weigh_older_samples_and_are_clipped(advantage: float, ratio: float, gradient: float) -> None:
    new = torch.tensor([[math.log(ratio) - 1.0]], requires_grad=True)
    surrogate(new, torch.tensor([[-1.0]]), torch.tensor([advantage]), torch.ones(1, 1)).backward()
    assert float(new.grad) == pytest.approx(gradient, rel=1e-5, abs=1e-6)


def test_answers_in_one_row_are_computed_as_each_by_itself(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    tiny_llama(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    prompt, answers = [5, 9, 2], [[7], [8, 1, 30, 4], [8, 1, 31]]
    row = Row.of(prompt, answers)
    with torch.inference_mode():
        together = model(
            input_ids=row.tokens, position_ids=row.positions, attention_mask=row.sees, logits_to_keep=row.before
        ).logits[0]
        alone = [model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1] for answer in answers]
    torch.testing.assert_close(together, torch.cat(alone))
    assert row.answered.tolist() == [token for answer in answers for token in answer]


@pytest.mark.parametrize("kind", ["mamba", "lfm2"])
def test_a_recurrent_model_is_refused_at_the_start(tmp_path: Path, kind: str) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2}
    if kind == "lfm2":  # its convolution sees the neighbours that the mask hides
        sizes |= {"intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
        sizes |= {"layer_types": ["conv", "full_attention"]}
    tiny_llama(tmp_path)  # for its tokeniser
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes))
    for parameter in model.parameters():
        parameter.data.mul_(3)
    model.save_pretrained(tmp_path)
    with pytest.raises(WrongModel, match=r"attention alone") as refused:
        Learner(tmp_path)
    assert type(model).__name__ in str(refused.value)


def test_a_model_of_attention_alone_is_learnt(tmp_path: Path) -> None:
    tiny_llama(tmp_path)
    Learner(tmp_path)


def test_one_island_joins_and_others_leave_in_turn_and_come_back() -> None:
    moves = {version: move for version in range(10) if (move := move_after(version, 3))}
    assert moves == {
        1: Move(2, joins=True), 2: Move(0, joins=False), 3: Move(0, joins=True), 6: Move(1, joins=False),
        7: Move(1, joins=True),
    }  # fmt: skip
    assert not any(move_after(version, 1) for version in range(10))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b'{"choices": []}',
        b'{"choices": [{"text": "", "finish_reason": "stop", "token_ids": [1], "logprobs": {"token_logprobs": []}}],'
        b'"weight_version_start": 1, "weight_version_end": 1}',
    ],
)
def test_an_answer_without_what_learning_needs_is_refused(data: bytes) -> None:
    with pytest.raises(BadAnswer):
        Answers.parse(200, data)


class Sidecar:
    """An island's HTTP side that says what a test wants."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.stamp = (0, 0)
        self.status = 200
        self.cut = False
        sidecar = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                stamp = sidecar.stamp
                sidecar.asked.append(body)
                choice = {
                    "text": "a",
                    "finish_reason": "length",
                    "token_ids": [5],
                    "logprobs": {"token_logprobs": [-1.0]},
                }
                said = {
                    "choices": [choice] * body["n"],
                    "weight_version_start": stamp[0],
                    "weight_version_end": stamp[1],
                }
                data = json.dumps(said).encode()
                self.send_response(sidecar.status)
                self.send_header("Content-Length", str(len(data) + (10 if sidecar.cut else 0)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def sidecar() -> Iterator[Sidecar]:
    made = Sidecar()
    yield made
    made.server.shutdown()
    made.server.server_close()


@pytest.fixture
def rollouts() -> Iterator[Rollouts]:
    made = Rollouts(lambda _text: [1, 2, 3], samples=4, budget=2, ahead=3)
    yield made
    made.close()


def test_asking_rests_while_enough_answers_wait(sidecar: Sidecar, rollouts: Rollouts) -> None:
    rollouts.add_island("holm", sidecar.url)
    eventually(lambda: rollouts.progress() == {"waiting": 3, "running": 0})
    assert len(sidecar.asked) == 3 and sidecar.asked[0]["weight_version"] == {"min_version": 0}
    assert sidecar.asked[0]["n"] == 4 and sidecar.asked[0]["prompt"] == [1, 2, 3]
    assert len(rollouts.take(5)) == 5
    assert rollouts.counts.by_staleness == {0: 20} and rollouts.counts.answered["holm"] >= 5


def test_the_budget_is_asked_for_and_checked_again_when_answers_are_used(sidecar: Sidecar, rollouts: Rollouts) -> None:
    rollouts.add_island("holm", sidecar.url)
    eventually(lambda: rollouts.progress()["waiting"] == 3)  # all of version 0
    rollouts.announce(3)
    rollouts.published(3)
    sidecar.stamp = 1, 3
    groups = rollouts.take(2)
    assert {group.oldest for group in groups} == {1}
    assert (
        rollouts.counts.stale == 12 and rollouts.counts.by_version == {1: 8} and rollouts.counts.by_staleness == {2: 8}
    )
    assert rollouts.counts.spanning >= 8
    assert sidecar.asked[-1]["weight_version"] == {"min_version": 1}
    sidecar.stamp = 3, 3
    assert {group.oldest for group in rollouts.take_newest(2)} == {3}
    assert rollouts.counts.by_version == {1: 8}  # looked at, not learnt from


@pytest.mark.parametrize("stamp", [(-1, 0), (1, 0), (0, 1)])
def test_stamps_that_cannot_be_are_counted_and_not_used(
    sidecar: Sidecar, rollouts: Rollouts, stamp: tuple[int, int]
) -> None:
    sidecar.stamp = stamp
    rollouts.add_island("holm", sidecar.url)
    eventually(lambda: rollouts.counts.misstamped)
    assert rollouts.progress()["waiting"] == 0


def test_refusals_and_islands_that_are_gone_cost_no_answer(sidecar: Sidecar, rollouts: Rollouts) -> None:
    sidecar.status = 409
    rollouts.add_island("holm", sidecar.url)
    rollouts.add_island("gone", f"http://127.0.0.1:{free_port()}")
    eventually(lambda: rollouts.counts.refused["409"] and rollouts.counts.unreachable)
    sidecar.status = 200
    assert len(rollouts.take(3)) == 3
    assert rollouts.counts.lost == 0 and set(rollouts.counts.answered) == {"holm"}


def test_an_answer_that_is_cut_off_is_lost_and_asked_for_again(sidecar: Sidecar, rollouts: Rollouts) -> None:
    sidecar.cut = True
    rollouts.add_island("holm", sidecar.url)
    eventually(lambda: rollouts.counts.lost)
    sidecar.cut = False
    assert len(rollouts.take(1)) == 1
