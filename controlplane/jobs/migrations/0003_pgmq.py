"""The message queue's tables and functions, from the script that the pinned `pgmq` package ships (plain SQL, no extension)."""

from django.db import migrations


def install(apps, schema_editor):
    from pgmq.install import get_embedded_install_sql

    with schema_editor.connection.cursor() as cursor:
        cursor.execute("select to_regnamespace('pgmq') is not null")
        if not cursor.fetchone()[0]:  # a database whose administrator installed the extension has it already
            cursor.execute(get_embedded_install_sql())


class Migration(migrations.Migration):
    dependencies = [("jobs", "0002_initial")]
    operations = [migrations.RunPython(install, migrations.RunPython.noop)]
