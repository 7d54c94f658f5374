"""Where tensors lie in models as vLLM lays them out: experts, biases, replicas; and layouts that way B must refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mailboat.island.engines.vllm_extension import Mapping, Stage, TensorSpec, Unmapped, job_of, live_sums, write

HIDDEN, INNER, EXPERTS = 16, 32, 4


def specs(shapes: dict[str, tuple[int, ...]]) -> list[TensorSpec]:
    return [TensorSpec(name, "BF16", shape, 2, (3, 5)) for name, shape in shapes.items()]


def random_bits(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-32768, 32767, shape, generator=generator, dtype=torch.int16)


def layer(kind: str, tensors: dict[str, torch.Tensor], **attributes: Any) -> torch.nn.Module:
    """A module of a class with that name, parameters from integers, and vLLM's attributes."""
    module = type(kind, (torch.nn.Module,), {})()
    for name, bits in tensors.items():
        weight = torch.nn.Parameter(bits.clone().contiguous().view(torch.bfloat16), requires_grad=False)
        module.register_parameter(name, weight)
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


def tree(modules: dict[str, torch.nn.Module]) -> torch.nn.Module:
    root = torch.nn.Module()
    for path, module in modules.items():
        at, *rest = root, *path.split(".")
        for name in rest[:-1]:
            if not hasattr(at, name):
                at.add_module(name, torch.nn.Module())
            at = getattr(at, name)
        at.add_module(rest[-1], module)
    return root


def check(full: dict[str, torch.Tensor], build: Any, ranks: int) -> None:
    """Every element has one home that answers for it, sums add up, and writes land where a load would put them."""
    mine = specs({name: tuple(bits.shape) for name, bits in full.items()})
    models = [build(rank, full) for rank in range(ranks)]
    mappings = [Mapping(model, mine, {}) for model in models]
    whole = Mapping(tree_of_whole(full), mine, {})
    changed = {name: bits.clone() for name, bits in full.items()}
    for index, spec in enumerate(mine):
        counts = [mapping.covered()[index] for mapping in mappings]
        assert sum(counts) == full[spec.name].numel(), (spec.name, counts)
        expected = live_sums(spec, whole.slices[index][0])
        parts = [part for mapping in mappings for part in mapping.slices[index] if part.counted]
        assert modular(live_sums(spec, part) for part in parts) == modular([expected]), spec.name
        where = torch.arange(0, full[spec.name].numel(), 3)
        values = random_bits((len(where),), index + 100)
        changed[spec.name].view(-1)[where] = values
        difference = []
        for mapping in mappings:
            for part in mapping.slices[index]:
                found = job_of(index, spec, part, where, values)
                if found is not None:
                    (made,) = write(Stage.of(0, [found]))
                    difference += [made] if part.counted else []
        after = live_sums(spec, Mapping(tree_of_whole(changed), mine, {}).slices[index][0])
        assert modular([expected, *difference]) == modular([after]), spec.name
    for rank, model in enumerate(models):
        loaded = dict(build(rank, changed).named_parameters())
        for name, weight in model.named_parameters():
            assert torch.equal(weight.view(torch.int16), loaded[name].view(torch.int16)), (rank, name)


def modular(sums: Any) -> tuple[int, int]:
    pairs = list(sums)
    return sum(a for a, _ in pairs) % (1 << 64), sum(b for _, b in pairs) % (1 << 64)


def tree_of_whole(full: dict[str, torch.Tensor]) -> torch.nn.Module:
    modules: dict[str, dict[str, torch.Tensor]] = {}
    for name, bits in full.items():
        path, _, leaf = name.rpartition(".")
        modules.setdefault(path, {})[leaf] = bits
    return tree({path: layer("Whole", tensors) for path, tensors in modules.items()})


def moe(*, spread: bool) -> tuple[dict[str, torch.Tensor], Any]:
    """Experts of two ranks: each a half of every expert, or (`spread`) every second expert whole."""
    shapes = {"mlp.gate.weight": (EXPERTS, HIDDEN)}
    for expert in range(EXPERTS):
        shapes |= {
            f"mlp.experts.{expert}.gate_proj.weight": (INNER, HIDDEN),
            f"mlp.experts.{expert}.up_proj.weight": (INNER, HIDDEN),
            f"mlp.experts.{expert}.down_proj.weight": (HIDDEN, INNER),
        }
    full = {name: random_bits(shape, seed) for seed, (name, shape) in enumerate(shapes.items())}

    def build(rank: int, bits: dict[str, torch.Tensor]) -> torch.nn.Module:
        size = 1 if spread else 2
        here = range(rank, EXPERTS, 2) if spread else range(EXPERTS)
        turn = 0 if spread else rank
        part = lambda expert, name, dim: bits[f"mlp.experts.{expert}.{name}.weight"].chunk(size, dim)[turn]  # noqa: E731
        w13 = torch.stack([torch.cat([part(e, "gate_proj", 0), part(e, "up_proj", 0)]) for e in here])
        w2 = torch.stack([part(e, "down_proj", 1) for e in here])
        places = torch.full((EXPERTS,), -1)
        places[list(here)] = torch.arange(len(here))
        experts = layer(
            "FusedMoE", {"w13_weight": w13, "w2_weight": w2}, tp_rank=turn, tp_size=size,
            expert_map=places if spread else None,
        )  # fmt: skip
        # What every rank has whole is answered for by the first; the rank stands in a layer that is cut.
        gate = layer("ReplicatedLinear", {"weight": bits["mlp.gate.weight"]}, tp_rank=rank, tp_size=2)
        return tree({"mlp.gate": gate, "mlp.experts": experts})

    return full, build


@pytest.mark.parametrize("spread", [False, True], ids=["tensor parallel", "expert parallel"])
def test_experts_lie_in_fused_weights(spread: bool) -> None:
    full, build = moe(spread=spread)
    check(full, build, 2)


def test_biases_are_cut_where_outputs_are_and_whole_where_inputs_are() -> None:
    heads, kv, head = 4, 2, 4
    shapes = {
        "q_proj": (heads * head, HIDDEN), "k_proj": (kv * head, HIDDEN), "v_proj": (kv * head, HIDDEN),
        "o_proj": (HIDDEN, heads * head), "fc1": (INNER, HIDDEN), "fc2": (HIDDEN, INNER),
    }  # fmt: skip
    full: dict[str, torch.Tensor] = {}
    for seed, (name, shape) in enumerate(shapes.items()):
        full |= {f"a.{name}.weight": random_bits(shape, seed), f"a.{name}.bias": random_bits(shape[:1], seed + 50)}

    def build(rank: int, bits: dict[str, torch.Tensor]) -> torch.nn.Module:
        tp = {"tp_rank": rank, "tp_size": 2}
        half = lambda name, dim=0: bits[name].chunk(2, dim)[rank]  # noqa: E731
        fused = {leaf: torch.cat([half(f"a.{n}_proj.{leaf}") for n in "qkv"]) for leaf in ("weight", "bias")}
        qkv = layer(
            "QKVParallelLinear", fused, head_size=head, num_heads=heads // 2, num_kv_heads=kv // 2,
            num_kv_head_replicas=1, **tp,
        )  # fmt: skip
        modules = {"a.qkv_proj": qkv}
        modules["a.fc1"] = layer(
            "ColumnParallelLinear", {leaf: half(f"a.fc1.{leaf}") for leaf in ("weight", "bias")}, **tp
        )
        for name in ("o_proj", "fc2"):  # each rank has the whole bias, one adds it
            tensors = {"weight": half(f"a.{name}.weight", 1), "bias": bits[f"a.{name}.bias"]}
            modules[f"a.{name}"] = layer("RowParallelLinear", tensors, **tp)
        return tree(modules)

    check(full, build, 2)


def gpt_style() -> tuple[torch.nn.Module, dict[str, tuple[int, ...]], dict[str, str]]:
    """Weights that the engine keeps transposed, as GPT-2's."""
    module = layer("QKVParallelLinear", {"weight": random_bits((3 * HIDDEN, HIDDEN), 1)})
    return tree({"h.attn.c_attn": module}), {"h.attn.c_attn.weight": (HIDDEN, 3 * HIDDEN)}, {}


def packed_head() -> tuple[torch.nn.Module, dict[str, tuple[int, ...]], dict[str, str]]:
    """A tied head that computes from a packed copy, as vLLM on CPUs makes one."""
    copy = torch.zeros(8)
    table = layer("VocabParallelEmbedding", {"weight": random_bits((50, HIDDEN), 1)})
    table.cpu_linear = lambda x, _weight, _bias: x + copy
    model = tree({"embed": table})
    model.add_module("lm_head", table)
    return model, {"embed.weight": (50, HIDDEN)}, {"lm_head.weight": "embed.weight"}


def quantised() -> tuple[torch.nn.Module, dict[str, tuple[int, ...]], dict[str, str]]:
    """Codes that the engine has repacked into words of another shape."""
    module = torch.nn.Module()
    module.register_parameter("weight", torch.nn.Parameter(torch.zeros(2, 64, dtype=torch.int32), requires_grad=False))
    return tree({"mlp.down_proj": module}), {"mlp.down_proj.weight": (HIDDEN, INNER)}, {}


def cut_word() -> tuple[torch.nn.Module, dict[str, tuple[int, ...]], dict[str, str]]:
    """A bias of six elements cut in two: half a word each, which no sum can be made of."""
    module = layer("ColumnParallelLinear", {"bias": random_bits((3,), 1)}, tp_rank=0, tp_size=2)
    return tree({"fc": module}), {"fc.bias": (6,)}, {}


@pytest.mark.parametrize("layout", [gpt_style, packed_head, quantised, cut_word])
def test_a30_layouts_that_can_not_be_written_are_refused_and_not_touched(layout: Any) -> None:
    model, shapes, aliases = layout()
    before = [weight.view(torch.uint8).clone() for weight in model.parameters()]
    mine = specs(shapes)
    with pytest.raises(Unmapped):
        Mapping(model, mine, aliases)
    assert all(torch.equal(a, b.view(torch.uint8)) for a, b in zip(before, model.parameters(), strict=True))
