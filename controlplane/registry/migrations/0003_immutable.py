"""What was published can't be changed: triggers that refuse it whoever asks (docs/adr/immutability-by-triggers.md)."""

from django.db import migrations

FUNCTIONS = """
CREATE FUNCTION mailboat_refuse_change() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION '% % is immutable', TG_TABLE_NAME, OLD.id
        USING ERRCODE = 'restrict_violation', HINT = 'Publish a new version instead.';
END $$;

CREATE FUNCTION mailboat_refuse_removal() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF current_setting('mailboat.retention', true) = 'on' THEN
        RETURN OLD;
    END IF;
    RAISE EXCEPTION '% % is removed by retention alone', TG_TABLE_NAME, OLD.id
        USING ERRCODE = 'restrict_violation', HINT = 'See controlplane.registry.retention.';
END $$;

-- A version that a worker builds gets its content once: before that its manifest is empty, after that nothing of it
-- changes. State, reason, job, ready_at and the derived statistics are its life, not its content.
CREATE FUNCTION mailboat_version_content() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF (NEW.id, NEW.run_id, NEW.epoch_id, NEW.number, NEW.parent_id, NEW.checkpoint_path, NEW.published_by,
            NEW.committed_at)
        IS DISTINCT FROM (OLD.id, OLD.run_id, OLD.epoch_id, OLD.number, OLD.parent_id, OLD.checkpoint_path,
            OLD.published_by, OLD.committed_at)
        OR (OLD.manifest_sha256 <> '' AND
            (NEW.state_digest, NEW.inventory_id, NEW.manifest_sha256, NEW.digests_sha256, NEW.envelope, NEW.step,
                NEW.changed, NEW.elements, NEW.full_bytes, NEW.patch_bytes, NEW.side_files)
            IS DISTINCT FROM (OLD.state_digest, OLD.inventory_id, OLD.manifest_sha256, OLD.digests_sha256,
                OLD.envelope, OLD.step, OLD.changed, OLD.elements, OLD.full_bytes, OLD.patch_bytes, OLD.side_files))
        OR (OLD.statistics_id IS NOT NULL AND NEW.statistics_id IS DISTINCT FROM OLD.statistics_id
            AND current_setting('mailboat.retention', true) IS DISTINCT FROM 'on')
        OR (OLD.state IN ('failed', 'retired') AND NEW.state <> OLD.state)
        OR (OLD.state = 'ready' AND NEW.state NOT IN ('ready', 'retired')) THEN
        RAISE EXCEPTION 'version % is immutable', OLD.number
            USING ERRCODE = 'restrict_violation', HINT = 'Publish a new version instead.';
    END IF;
    RETURN NEW;
END $$;

-- The codecs of a patch are known once its parts have been read, by the validation.
CREATE FUNCTION mailboat_patch_content() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF (NEW.id, NEW.run_id, NEW.from_version_id, NEW.to_version_id, NEW.kind, NEW.bytes)
        IS DISTINCT FROM (OLD.id, OLD.run_id, OLD.from_version_id, OLD.to_version_id, OLD.kind, OLD.bytes)
        OR (OLD.codecs <> '' AND NEW.codecs <> OLD.codecs) THEN
        RAISE EXCEPTION 'patch % is immutable', OLD.id USING ERRCODE = 'restrict_violation';
    END IF;
    RETURN NEW;
END $$;

-- Islands refuse a head whose (generation, serial) is lower than one they have seen: so does the database.
CREATE FUNCTION mailboat_head_rises() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF (NEW.generation, NEW.serial) < (OLD.generation, OLD.serial)
        OR ((NEW.generation, NEW.serial) = (OLD.generation, OLD.serial)
            AND NEW.version_id IS DISTINCT FROM OLD.version_id) THEN
        RAISE EXCEPTION 'channel % can''t go back to serial % of generation %', OLD.name, NEW.serial, NEW.generation
            USING ERRCODE = 'restrict_violation', HINT = 'A rollback is a higher serial on an older version.';
    END IF;
    RETURN NEW;
END $$;
"""

DROP_FUNCTIONS = """
DROP FUNCTION mailboat_head_rises();
DROP FUNCTION mailboat_patch_content();
DROP FUNCTION mailboat_version_content();
DROP FUNCTION mailboat_refuse_removal();
DROP FUNCTION mailboat_refuse_change();
"""

FIXED = ["inventory", "blob", "epoch", "patchpart", "anchor"]  # nothing of these rows ever changes
KEPT = [*FIXED, "version", "patch"]  # these go through retention alone


def _triggers() -> list[migrations.RunSQL]:
    chosen = [(table, "unchanged", "UPDATE", "mailboat_refuse_change") for table in FIXED]
    chosen += [
        ("version", "content", "UPDATE", "mailboat_version_content"),
        ("patch", "content", "UPDATE", "mailboat_patch_content"),
        ("channel", "rises", "UPDATE", "mailboat_head_rises"),
    ]
    chosen += [(table, "kept", "DELETE", "mailboat_refuse_removal") for table in KEPT]
    changed = {"mailboat_refuse_change": "WHEN (OLD.* IS DISTINCT FROM NEW.*)"}
    return [
        migrations.RunSQL(
            f"CREATE TRIGGER {table}_{name} BEFORE {event} ON registry_{table} FOR EACH ROW "
            f"{changed.get(function, '')} EXECUTE FUNCTION {function}()",
            f"DROP TRIGGER {table}_{name} ON registry_{table}",
        )
        for table, name, event, function in chosen
    ]


class Migration(migrations.Migration):
    """Adds the triggers."""

    dependencies = [("registry", "0002_settings_and_statistics")]

    operations = [migrations.RunSQL(FUNCTIONS, DROP_FUNCTIONS), *_triggers()]
