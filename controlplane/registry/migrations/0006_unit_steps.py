"""How many changes of a version are steps of one: written once, by the validation."""

import importlib

from django.db import migrations, models

BEFORE = importlib.import_module("controlplane.registry.migrations.0005_lineage_triggers").VERSION
AFTER = BEFORE.replace(
    "OR (OLD.statistics_id",
    "OR (OLD.unit_steps IS NOT NULL AND NEW.unit_steps IS DISTINCT FROM OLD.unit_steps)\n        OR (OLD.statistics_id",
    1,
)


class Migration(migrations.Migration):
    """Adds the column and widens the trigger."""

    dependencies = [("registry", "0005_lineage_triggers")]

    operations = [
        migrations.AddField(model_name="version", name="unit_steps", field=models.BigIntegerField(null=True)),
        migrations.RunSQL(AFTER, BEFORE),
    ]
