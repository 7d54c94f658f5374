"""What a run's step patches are encoded for; runs that there are keep the smallest ones. And how many elements a step
changes, which its version always said and the planner reads from the patch.
"""

from django.db import migrations, models

COUNT = """
UPDATE registry_patch SET changed = version.changed FROM registry_version version
WHERE version.id = registry_patch.to_version_id AND registry_patch.kind = 'step' AND registry_patch.changed IS NULL
"""


class Migration(migrations.Migration):
    """Adds the column and fills the other."""

    dependencies = [("registry", "0006_unit_steps")]

    operations = [
        migrations.AddField(
            model_name="run",
            name="encode_for",
            field=models.CharField(choices=[("size", "Size"), ("link", "Link")], default="size", max_length=4),
        ),
        migrations.RunSQL(COUNT, migrations.RunSQL.noop),
    ]
