"""How quick an island is with patches that have nothing contextual in them."""

from django.db import migrations, models


class Migration(migrations.Migration):
    """Adds the column."""

    dependencies = [("fleet", "0004_budgets_and_members")]

    operations = [
        migrations.AddField(
            model_name="island", name="quick_bytes_per_second", field=models.BigIntegerField(null=True)
        )
    ]
