"""Entries are added and nothing else: triggers that refuse to change or remove one, whoever asks."""

import django.db.models.deletion
from django.db import migrations, models

CREATE = """
CREATE FUNCTION mailboat_audit_append_only() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'audit entry % is immutable: the log is append-only', OLD.id
        USING ERRCODE = 'restrict_violation', HINT = 'Record another entry instead.';
END $$;
CREATE TRIGGER entry_append_only BEFORE UPDATE OR DELETE ON audit_entry
    FOR EACH ROW EXECUTE FUNCTION mailboat_audit_append_only();
"""

DROP = """
DROP TRIGGER entry_append_only ON audit_entry;
DROP FUNCTION mailboat_audit_append_only();
"""


class Migration(migrations.Migration):
    """Adds the trigger; a project that has entries can't be deleted with them."""

    dependencies = [("audit", "0002_initial")]

    operations = [
        migrations.AlterField(
            model_name="entry",
            name="project",
            field=models.ForeignKey(
                null=True,
                on_delete=django.db.models.deletion.PROTECT,
                related_name="audit_entries",
                to="registry.project",
            ),
        ),
        migrations.RunSQL(CREATE, DROP),
    ]
