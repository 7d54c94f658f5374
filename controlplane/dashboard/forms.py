"""Forms of the pages: they read what a person typed and say what is wrong with it in one sentence per field."""

from __future__ import annotations

from typing import Any

from django import forms
from django.core.validators import validate_slug

from controlplane.fleet import services
from controlplane.fleet.models import EnrolmentToken, Island
from controlplane.registry.models import Channel, Project

ENGINES = [("checkpoint", "checkpoint")]


class ChannelField(forms.ModelChoiceField):
    """A channel, named with its run."""

    def label_from_instance(self, obj: Any) -> str:
        """run · channel."""
        return f"{obj.run.name} · {obj.name}"


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
        choices=ENGINES, help_text="What loads the weights there; checkpoint only keeps the files."
    )

    def __init__(self, project: Project, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.project = project
        channels = (
            Channel.objects.filter(run__project=project).select_related("run").order_by("-run__created_at", "name")
        )
        field = self.fields["channel"]
        assert isinstance(field, ChannelField)  # noqa: S101  declared above
        field.queryset = channels

    def clean_name(self) -> str:
        """A name that no island of the project has."""
        name: str = self.cleaned_data["name"]
        if Island.objects.filter(project=self.project, name=name).exists():
            raise forms.ValidationError(f"There is an island {name} in this project already; choose another name.")
        return name

    def create(self, actor: str) -> tuple[EnrolmentToken, str]:
        """A one-time token for what was asked; the second value is its text. Raises Refusal."""
        asked = dict(self.cleaned_data)
        channel: Channel = asked.pop("channel")
        return services.create_enrolment_token(channel.run, channel, actor=actor, **asked)
