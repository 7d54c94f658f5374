"""The new columns of published rows are as fixed as the old ones (docs/adr/immutability-by-triggers.md)."""

import importlib

from django.db import migrations

BEFORE = importlib.import_module("controlplane.registry.migrations.0003_immutable").FUNCTIONS


def _function(name: str) -> str:
    """One function of the migration before, as a statement that takes the place of what there is."""
    start = BEFORE.index(f"CREATE FUNCTION {name}(")
    end = BEFORE.index("END $$;", start) + len("END $$;")
    return BEFORE[start:end].replace("CREATE FUNCTION", "CREATE OR REPLACE FUNCTION", 1)


VERSION = (
    _function("mailboat_version_content")
    .replace("NEW.published_by,", "NEW.published_by, NEW.source_id,")
    .replace("OLD.published_by,", "OLD.published_by, OLD.source_id,")
)
PATCH = _function("mailboat_patch_content").replace(
    "OR (OLD.codecs",
    "OR (OLD.changed IS NOT NULL AND NEW.changed IS DISTINCT FROM OLD.changed)\n        OR (OLD.codecs",
)
KEY = """
-- Of a publisher's key only the revocation is written later, and only once.
CREATE FUNCTION mailboat_run_key() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF (NEW.id, NEW.run_id, NEW.kind, NEW.public_key, NEW.name, NEW.created_by, NEW.created_at)
        IS DISTINCT FROM (OLD.id, OLD.run_id, OLD.kind, OLD.public_key, OLD.name, OLD.created_by, OLD.created_at)
        OR (OLD.revoked_at IS NOT NULL AND NEW IS DISTINCT FROM OLD) THEN
        RAISE EXCEPTION 'key % is immutable', OLD.id
            USING ERRCODE = 'restrict_violation', HINT = 'Revoke it and register another one.';
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER runkey_content BEFORE UPDATE ON registry_runkey FOR EACH ROW EXECUTE FUNCTION mailboat_run_key();
CREATE TRIGGER runkey_kept BEFORE DELETE ON registry_runkey FOR EACH ROW EXECUTE FUNCTION mailboat_refuse_removal();
"""
DROP_KEY = """
DROP TRIGGER runkey_kept ON registry_runkey;
DROP TRIGGER runkey_content ON registry_runkey;
DROP FUNCTION mailboat_run_key();
"""


class Migration(migrations.Migration):
    """Widens two functions and adds one."""

    dependencies = [("registry", "0004_lineage_and_trust")]

    operations = [
        migrations.RunSQL(VERSION, _function("mailboat_version_content")),
        migrations.RunSQL(PATCH, _function("mailboat_patch_content")),
        migrations.RunSQL(KEY, DROP_KEY),
    ]
