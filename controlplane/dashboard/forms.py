"""Forms of the pages: they read what a person typed and say what is wrong with it in one sentence per field."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django import forms
from django.core.validators import validate_slug

from controlplane.accounts import services as accounts
from controlplane.accounts.models import Token
from controlplane.fleet import services
from controlplane.fleet.models import EnrolmentToken, Island
from controlplane.registry import steering
from controlplane.registry.models import Channel, Project, Run
from controlplane.registry.needs import LONGEST_DAYS

ENGINES = [(name, name) for name in ("checkpoint", "local", "vllm", "sglang")]


class ChannelField(forms.ModelChoiceField):
    """A channel, named with its run."""

    def label_from_instance(self, obj: Any) -> str:
        """run · channel."""
        return f"{obj.run.name} · {obj.name}"


class RunField(forms.ModelChoiceField):
    """A run by its name."""

    def label_from_instance(self, obj: Any) -> str:
        """The name."""
        return str(obj.name)


class TokenForm(forms.Form):
    """What a token of a program may do, where, and for how long."""

    name = forms.CharField(
        max_length=80,
        help_text="Who or what will hold it.",
        widget=forms.TextInput(attrs={"autofocus": True, "autocomplete": "off", "spellcheck": "false"}),
    )
    role = forms.ChoiceField(
        choices=[
            (Token.Role.PUBLISHER, "publisher: publishes versions"),
            (Token.Role.OPERATOR, "operator: steers islands, channels and jobs"),
            (Token.Role.VIEWER, "viewer: reads"),
        ]
    )
    run = RunField(
        queryset=Run.objects.none(),
        required=False,
        empty_label="every run",
        help_text="A token may be for one run only.",
    )
    days = forms.TypedChoiceField(
        label="Lifetime",
        coerce=int,
        initial=90,
        choices=[(7, "7 days"), (30, "30 days"), (90, "90 days"), (365, "1 year"), (0, "does not expire")],
    )

    def __init__(self, project: Project, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.project = project
        field = self.fields["run"]
        assert isinstance(field, RunField)  # noqa: S101  declared above
        field.queryset = Run.objects.filter(project=project).order_by("name")

    def create(self, actor: str) -> tuple[Token, str]:
        """The token; the second value is its text, which is shown once."""
        asked = self.cleaned_data
        lifetime = timedelta(days=asked["days"]) if asked["days"] else None
        return accounts.create_token(
            self.project, asked["role"], asked["name"], actor=actor, lifetime=lifetime, run=asked["run"]
        )


class RegisterForm(forms.Form):
    """What a new island follows and where it stands."""

    name = forms.CharField(
        max_length=60,
        validators=[validate_slug],
        help_text="Letters, digits, - and _. Unique in the project.",
        widget=forms.TextInput(attrs={"autofocus": True, "autocomplete": "off", "spellcheck": "false"}),
    )
    channel = ChannelField(queryset=Channel.objects.none(), label="Run and channel", empty_label=None)
    provider = forms.CharField(max_length=60, required=False, help_text="Whose machine it is.")
    region = forms.CharField(max_length=60, required=False, help_text="Where it stands.")
    engine = forms.ChoiceField(
        choices=ENGINES, help_text="What serves the weights there; checkpoint only keeps the files."
    )
    reusable = forms.BooleanField(
        required=False,
        label="For many machines",
        help_text="The command works again and again for 30 days; each machine then waits until you approve its key.",
    )

    def __init__(self, project: Project, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.project = project
        channels = (
            Channel.objects.filter(run__project=project)
            .exclude(name__startswith=Channel.PINS)
            .select_related("run")
            .order_by("-run__created_at", "name")
        )
        field = self.fields["channel"]
        assert isinstance(field, ChannelField)  # noqa: S101  declared above
        field.queryset = channels

    def clean_name(self) -> str:
        """A name that no island of the project has."""
        name: str = self.cleaned_data["name"]
        if not self.data.get("reusable") and Island.objects.filter(project=self.project, name=name).exists():
            raise forms.ValidationError(f"There is an island {name} in this project already; choose another name.")
        return name

    def create(self, actor: str) -> tuple[EnrolmentToken, str]:
        """A one-time token for what was asked; the second value is its text. Raises Refusal."""
        asked = dict(self.cleaned_data)
        channel: Channel = asked.pop("channel")
        return services.create_enrolment_token(channel.run, channel, actor=actor, **asked)


class MoveForm(forms.Form):
    """Where a channel is to point. Going back needs a reason and the channel's name."""

    version = forms.IntegerField(min_value=0, label="Version")
    reason = forms.CharField(required=False, max_length=300, help_text="Islands' operators read it.")
    typed = forms.CharField(
        required=False,
        label="Channel's name",
        widget=forms.TextInput(attrs={"autocomplete": "off", "spellcheck": "false"}),
    )
    seen = forms.IntegerField(widget=forms.HiddenInput)

    def __init__(self, channel: Channel, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.channel = channel
        self.fields["typed"].help_text = f"Type {channel.name} to confirm."
        if not self.backwards:
            del self.fields["typed"]
        else:
            self.fields["reason"].required = True

    @property
    def target(self) -> int | None:
        """The number that is asked for, as far as it is one."""
        asked = str(self["version"].value() or "")
        return int(asked) if asked.isascii() and asked.isdigit() and len(asked) < 19 else None

    @property
    def backwards(self) -> bool:
        """True for a rollback."""
        at = self.channel.version
        return at is not None and self.target is not None and self.target < at.number

    def clean_typed(self) -> str:
        """The channel's own name."""
        typed: str = self.cleaned_data["typed"].strip()
        if typed != self.channel.name:
            raise forms.ValidationError(f"Type {self.channel.name} to confirm.")
        return typed

    def move(self, actor: str) -> None:
        """Do it. Raises Changed and Refusal."""
        asked = self.cleaned_data
        steering.edit_channel(
            self.channel,
            version=asked["version"],
            protected=None,
            reason=asked["reason"],
            seen=asked["seen"],
            actor=actor,
        )


class ChannelForm(forms.Form):
    """A further channel of a run."""

    name = forms.CharField(
        max_length=40,
        validators=[validate_slug],
        help_text="Letters, digits, - and _, such as stable or canary.",
        widget=forms.TextInput(attrs={"autofocus": True, "autocomplete": "off", "spellcheck": "false"}),
    )
    version = forms.IntegerField(min_value=0, required=False, help_text="Where it begins; empty: nowhere yet.")
    protected = forms.BooleanField(
        required=False, initial=True, label="Protected", help_text="It moves by an operator's hand alone."
    )

    def __init__(self, run: Run, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.run = run

    def clean_name(self) -> str:
        """A name that no pin may have."""
        name: str = self.cleaned_data["name"]
        if name.startswith(Channel.PINS):
            raise forms.ValidationError(f"Names that begin with {Channel.PINS} belong to pinned islands.")
        return name

    def create(self, actor: str) -> None:
        """Do it. Raises Changed and Refusal."""
        asked = self.cleaned_data
        steering.create_channel(
            self.run,
            asked["name"],
            version=asked["version"],
            protected=asked["protected"],
            reason="",
            actor=actor,
        )


def _limit(label: str, help_text: str, most: int = 2**31 - 1) -> forms.IntegerField:
    return forms.IntegerField(min_value=1, max_value=most, required=False, label=label, help_text=help_text)


class SettingsForm(forms.Form):
    """The settings of a run. Empty stands for no limit."""

    announce = forms.ChoiceField(choices=Run.Announce.choices, help_text="When the channel latest moves.")
    encode_for = forms.ChoiceField(
        choices=Run.EncodeFor.choices, required=False, label="Encode for",
        help_text="Size: the smallest patches. Link: whatever the islands have sooner over the links that they have.",
    )  # fmt: skip
    staleness_versions = _limit("Staleness budget, versions", "An island further behind needs attention.")
    staleness_seconds = _limit("Staleness budget, seconds", "The same in time.")
    anchor_every = _limit("Anchor every", "So many versions; a newcomer starts at an anchor.")
    merge_up_to = forms.IntegerField(
        min_value=0, max_value=2**31 - 1, required=False, label="Merge up to",
        help_text="Aligned spans of 2, 4, 8 ... up to so many versions get one patch ahead of need; 0: none.",
    )  # fmt: skip
    keep_versions = _limit("Keep versions", "The newest so many.")
    keep_days = _limit("Keep days", "And everything younger than this.", LONGEST_DAYS)
    seen = forms.IntegerField(widget=forms.HiddenInput)

    def __init__(self, run: Run, data: Any = None) -> None:
        initial = {name: getattr(run, name) for name in steering.SETTINGS} | {"seen": run.revision}
        super().__init__(data, initial=initial)
        self.run = run

    def clean_encode_for(self) -> str:
        """Left out, it stays as it is."""
        return self.cleaned_data["encode_for"] or self.run.encode_for

    def clean_merge_up_to(self) -> int:
        """Left empty, it stays as it is."""
        asked = self.cleaned_data["merge_up_to"]
        return self.run.merge_up_to if asked is None else int(asked)

    def save(self, actor: str) -> None:
        """Write what changed. Raises Changed."""
        asked = dict(self.cleaned_data)
        steering.edit_run(self.run, asked, seen=asked.pop("seen"), actor=actor)
